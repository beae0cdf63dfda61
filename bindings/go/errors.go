package metrale

// #include "shim.h"
import "C"

import (
	"fmt"
	"io/fs"
)

// Status is the kind of a failure. Every error of the library matches its status:
//
//	if errors.Is(err, metrale.ErrContextFull) { ... }
//
// A later library may return statuses that are not named here.
type Status int32

// The kinds of failure, with the meanings that metrale.h gives them.
const (
	ErrInvalidArgument   Status = C.METRALE_INVALID_ARGUMENT
	ErrInvalidHandle     Status = C.METRALE_INVALID_HANDLE // the object was closed
	ErrInvalidState      Status = C.METRALE_INVALID_STATE
	ErrInvalidToken      Status = C.METRALE_INVALID_TOKEN
	ErrContextFull       Status = C.METRALE_CONTEXT_FULL
	ErrOutOfMemory       Status = C.METRALE_OUT_OF_MEMORY
	ErrNotFound          Status = C.METRALE_NOT_FOUND // matches fs.ErrNotExist as well
	ErrIO                Status = C.METRALE_IO
	ErrNotAModel         Status = C.METRALE_NOT_A_MODEL
	ErrCorruptFile       Status = C.METRALE_CORRUPT_FILE
	ErrUnsupported       Status = C.METRALE_UNSUPPORTED
	ErrMismatch          Status = C.METRALE_MISMATCH
	ErrTooLarge          Status = C.METRALE_TOO_LARGE
	ErrLimitExceeded     Status = C.METRALE_LIMIT_EXCEEDED
	ErrUnknownOption     Status = C.METRALE_UNKNOWN_OPTION
	ErrTemplate          Status = C.METRALE_TEMPLATE
	ErrInvalidGrammar    Status = C.METRALE_INVALID_GRAMMAR
	ErrCancelled         Status = C.METRALE_CANCELLED
	ErrNumericFault      Status = C.METRALE_NUMERIC_FAULT
	ErrNoValidToken      Status = C.METRALE_NO_VALID_TOKEN
	ErrBusy              Status = C.METRALE_BUSY
	ErrVersionMismatch   Status = C.METRALE_VERSION_MISMATCH
	ErrDeviceUnsupported Status = C.METRALE_DEVICE_UNSUPPORTED
	ErrDeviceLost        Status = C.METRALE_DEVICE_LOST
	ErrInternal          Status = C.METRALE_INTERNAL
	ErrGrammarDone       Status = C.METRALE_GRAMMAR_DONE
)

// Error is the status's name, such as "METRALE_BUSY".
func (s Status) Error() string {
	return C.GoString(C.metrale_status_name(C.metrale_status(s)))
}

// Error is what a failed call says: what was found, what was expected and what helps.
type Error struct {
	Status  Status // what errors.Is compares with
	Message string // English, whole sentences
	Name    string // the option, key, file or tensor it is about, or ""
	Offset  *uint64
	// How much was asked for and how much there is, in the unit that Message names; nil when it is not about an amount.
	Wanted, Available *uint64
	Retry             bool // the same call may succeed later without a change by the caller
	cause             error
}

// Error gives the message, with the status's name before it.
func (e *Error) Error() string {
	if e.cause != nil {
		return fmt.Sprintf("metrale: %s: %s: %v", e.Status.Error(), e.Message, e.cause)
	}
	return fmt.Sprintf("metrale: %s: %s", e.Status.Error(), e.Message)
}

// Is says whether target is this error's Status; [ErrNotFound] is also [fs.ErrNotExist].
func (e *Error) Is(target error) bool {
	return target == e.Status || e.Status == ErrNotFound && target == fs.ErrNotExist
}

// Unwrap gives the error of a callback (an [io.ReaderAt], a [Hook]) that made the call fail, or nil.
func (e *Error) Unwrap() error { return e.cause }

// failure turns a failed call's status and error object into a Go error, and frees the object.
func failure(status C.metrale_status, object *C.metrale_error) *Error {
	e := &Error{Status: Status(status)}
	if object == nil {
		e.Message = "no details"
		return e
	}
	e.Message = C.GoString(C.metrale_error_message(object))
	e.Name = C.GoString(C.metrale_error_name(object))
	e.Retry = bool(C.metrale_error_retry(object))
	var number C.uint64_t
	if C.metrale_error_offset(object, &number) {
		e.Offset = amount(number)
	}
	if C.metrale_error_wanted(object, &number) {
		e.Wanted = amount(number)
	}
	if C.metrale_error_available(object, &number) {
		e.Available = amount(number)
	}
	C.metrale_error_free(object)
	return e
}

func amount(number C.uint64_t) *uint64 {
	value := uint64(number)
	return &value
}

func invalid(format string, words ...any) error {
	return &Error{Status: ErrInvalidArgument, Message: fmt.Sprintf(format, words...)}
}
