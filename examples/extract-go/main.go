// Extract reads a text and says what is in it as JSON that follows a schema.
//
//	extract -schema event.json model.gguf "Ann and Bo meet for lunch on Friday at noon, at the harbour."
//
// The schema is compiled into a grammar that rules out every token that would break it, so the answer always parses and always
// fits; whether it is true is up to the model.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"

	"metrale"
)

//go:embed event.json
var eventSchema string

// prompt asks for the facts of a text, in the way the model was trained to be asked where it was.
func prompt(model *metrale.Model, schema, text string) ([]metrale.Token, error) {
	task := "Extract the facts of the text as one JSON object that follows this schema:\n" + schema + "\nText: " + text
	tokens, err := model.ChatTokens(metrale.Message{Role: "user", Content: task})
	if errors.Is(err, metrale.ErrNotFound) { // no chat template
		tokens, err = model.Tokenize("Text: " + text + "\nJSON: ")
	}
	return tokens, err
}

// extract gives one JSON value that follows the schema.
func extract(ctx context.Context, model *metrale.Model, schema, text string) (json.RawMessage, error) {
	grammar, err := model.JSONSchema(schema)
	if err != nil {
		return nil, fmt.Errorf("the schema: %w", err)
	}
	defer grammar.Close()
	tokens, err := prompt(model, schema, text)
	if err != nil {
		return nil, err
	}
	var answer strings.Builder
	var end metrale.End
	for piece, err := range model.Generate(ctx, tokens, &metrale.GenerateOptions{Grammar: grammar}) {
		if err != nil {
			return nil, err
		}
		answer.WriteString(piece.Text)
		end = piece.End
	}
	if end == metrale.EndContext {
		return nil, fmt.Errorf("the model's context is full before the JSON ends: %s", answer.String())
	}
	return json.RawMessage(answer.String()), nil
}

func run() error {
	path := flag.String("schema", "", "a file with a JSON schema (default: that of a meeting)")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: extract [-schema FILE] MODEL TEXT")
		flag.PrintDefaults()
	}
	flag.Parse() // a wrong option shows the usage and exits with 2
	if flag.NArg() != 2 {
		flag.Usage()
		os.Exit(2)
	}
	schema := eventSchema
	if *path != "" {
		file, err := os.ReadFile(*path)
		if err != nil {
			return err
		}
		schema = string(file)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	model, err := metrale.Load(ctx, flag.Arg(0), nil)
	if err != nil {
		return err
	}
	defer model.Close()
	answer, err := extract(ctx, model, schema, flag.Arg(1))
	if err == nil {
		fmt.Println(string(answer))
	}
	return err
}

func main() {
	if err := run(); err != nil {
		log.SetFlags(0)
		log.Fatal("extract: ", err)
	}
}
