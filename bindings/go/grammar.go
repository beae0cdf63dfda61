package metrale

// #include "shim.h"
import "C"

import "runtime"

// Grammar is a compiled grammar: immutable, it may serve any number of sequences of its model.
type Grammar struct {
	handle *C.metrale_grammar
	owned  *owned
}

type compiler func(m *C.metrale_model, text *C.uint8_t, size C.size_t, out **C.metrale_grammar, err **C.metrale_error) C.metrale_status

func (m *Model) compile(text string, compile compiler) (*Grammar, error) {
	defer runtime.KeepAlive(m)
	var handle *C.metrale_grammar
	err := do(func(err **C.metrale_error) C.metrale_status {
		return compile(m.handle, bytesOf(text), C.size_t(len(text)), &handle, err)
	})
	if err != nil {
		return nil, err
	}
	g := &Grammar{handle: handle}
	g.owned = own(g, func() { C.metrale_grammar_free(handle) })
	return g, nil
}

// JSONSchema compiles a JSON schema: a sequence that follows it says one JSON value that the schema allows. Keys that are not
// understood are refused. Takes from milliseconds to seconds, a model's first grammar some more.
func (m *Model) JSONSchema(schema string) (*Grammar, error) {
	return m.compile(schema, func(m *C.metrale_model, text *C.uint8_t, size C.size_t, out **C.metrale_grammar, err **C.metrale_error) C.metrale_status {
		return C.metrale_grammar_json_schema(m, text, size, out, err)
	})
}

// GBNF compiles a grammar of rules `name ::= ...`; the start is root.
func (m *Model) GBNF(source string) (*Grammar, error) {
	return m.compile(source, func(m *C.metrale_model, text *C.uint8_t, size C.size_t, out **C.metrale_grammar, err **C.metrale_error) C.metrale_status {
		return C.metrale_grammar_gbnf(m, text, size, out, err)
	})
}

// Lark compiles a grammar in Lark's notation; the start is start.
func (m *Model) Lark(source string) (*Grammar, error) {
	return m.compile(source, func(m *C.metrale_model, text *C.uint8_t, size C.size_t, out **C.metrale_grammar, err **C.metrale_error) C.metrale_status {
		return C.metrale_grammar_lark(m, text, size, out, err)
	})
}

// Regex compiles a regular expression, which the whole text matches.
func (m *Model) Regex(pattern string) (*Grammar, error) {
	return m.compile(pattern, func(m *C.metrale_model, text *C.uint8_t, size C.size_t, out **C.metrale_grammar, err **C.metrale_error) C.metrale_status {
		return C.metrale_grammar_regex(m, text, size, out, err)
	})
}

// Close gives the grammar up; sequences that follow it keep it. Safe from any goroutine, as often as wanted.
func (g *Grammar) Close() error {
	g.owned.release()
	return nil
}
