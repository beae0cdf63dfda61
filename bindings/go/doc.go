// Package metrale runs language models inside your own process, through libmetrale.so.
//
// A [Model] is loaded once and shared; a [Sequence] is one timeline of tokens with all its state. The short road:
//
//	model, err := metrale.Load(ctx, "model.gguf", nil)
//	...
//	defer model.Close()
//	prompt, err := model.Tokenize("Once upon a time")
//	...
//	for piece, err := range model.Generate(ctx, prompt, nil) {
//		if err != nil {
//			return err
//		}
//		fmt.Print(piece.Text)
//	}
//
// For models that were trained to chat, [Model.ChatTokens] makes the prompt. What is underneath, to be used where more is wanted:
// [Model.NewSequence], [Sequence.Prefill], [Sequence.Stream] and [Sequence.Next]; marks, forks and saved states; samplers with a
// hook of your own; grammars and JSON schemas; embeddings.
//
// # Goroutines
//
// Models, runtimes, sources and grammars may be used by any number of goroutines at once; of a sequence's methods one at a time
// may change it, and a second one gets [ErrBusy] rather than waiting. All sequences of a model that want tokens are stepped
// together by one goroutine, so a thousand goroutines that wait for tokens need no thousand threads. Where the end of a context
// ends a call, it does so in the middle of the computation, and the sequence is as it was before the call (but see
// [Sequence.Stream]).
//
// # Errors
//
// Errors of the library are [*Error] and match the [Status] they have, for [errors.Is]:
//
//	if errors.Is(err, metrale.ErrContextFull) { ... }
//
// # Memory
//
// Every object has a Close, which may be called by any goroutine, at any time, as often as wanted; what still needs the object
// keeps it alive. The garbage collector closes what was forgotten, but it does not know how large a model is.
//
// # Building
//
// cgo finds the library by pkg-config. For one that is not in the system's folders set PKG_CONFIG_PATH to the folder of metrale.pc,
// and let the program find the library, for example by LD_LIBRARY_PATH. With the tag metrale_static, the library becomes part of
// the program.
package metrale
