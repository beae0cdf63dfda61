package metrale_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"log/slog"
	"os"
	"sync"
	"time"

	"metrale"
)

const path = "../../tests/fixtures/stories260k/model.gguf"

func loaded() *metrale.Model {
	model, err := metrale.Load(context.Background(), path, &metrale.LoadOptions{Threads: 1})
	if err != nil {
		log.Fatal(err)
	}
	return model
}

// Load a model and let it go on with a text.
func Example() {
	ctx := context.Background()
	model, err := metrale.Load(ctx, path, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	prompt, err := model.Tokenize("Once upon a time")
	if err != nil {
		log.Fatal(err)
	}
	options := &metrale.GenerateOptions{StreamOptions: metrale.StreamOptions{Stops: []string{"."}}}
	for piece, err := range model.Generate(ctx, prompt, options) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Print(piece.Text)
	}
	fmt.Println(".")
	// Output: , there was a little girl named Lily.
}

// Many goroutines share each pass over the weights.
func ExampleModel_Generate() {
	model := loaded()
	defer model.Close()
	prompts := []string{"Once upon a time", "Lily and Tom"}
	answers := make([]string, len(prompts))
	var group sync.WaitGroup
	for i, text := range prompts {
		group.Add(1)
		go func() {
			defer group.Done()
			prompt, _ := model.Tokenize(text)
			options := &metrale.GenerateOptions{StreamOptions: metrale.StreamOptions{MaxTokens: 12}}
			for piece, err := range model.Generate(context.Background(), prompt, options) {
				if err != nil {
					log.Fatal(err)
				}
				answers[i] += piece.Text
			}
		}()
	}
	group.Wait()
	fmt.Println(answers[0] != "" && answers[1] != "")
	// Output: true
}

// The end of a context ends a stream at once.
func ExampleSequence_Stream() {
	model := loaded()
	defer model.Close()
	seq, err := model.NewSequence(&metrale.SequenceOptions{
		Sampler: &metrale.Sampler{Seed: 1, Stages: []metrale.Stage{metrale.TopK(40), metrale.Temperature(0.8)}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer seq.Close()
	prompt, _ := model.Tokenize("Once upon a time")
	if err := seq.Prefill(context.Background(), prompt); err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, err := range seq.Stream(ctx, nil) {
		if err != nil {
			fmt.Println(errors.Is(err, context.Canceled))
			break
		}
		cancel()
	}
	// Output: true
}

// Try a continuation, and go back as if it had not been.
func ExampleSequence_Rollback() {
	ctx := context.Background()
	model := loaded()
	defer model.Close()
	seq, err := model.NewSequence(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer seq.Close()
	prompt, _ := model.Tokenize("Once upon a time")
	if err := seq.Prefill(ctx, prompt); err != nil {
		log.Fatal(err)
	}
	mark, err := seq.Mark()
	if err != nil {
		log.Fatal(err)
	}
	first, _, _ := seq.Next(ctx)
	if err := seq.Rollback(mark); err != nil {
		log.Fatal(err)
	}
	again, _, _ := seq.Next(ctx)
	fmt.Println(first == again)
	// Output: true
}

// A JSON schema rules out every token that would break it.
func ExampleModel_JSONSchema() {
	model := loaded()
	defer model.Close()
	grammar, err := model.JSONSchema(`{"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
		"required": ["age"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}`)
	if err != nil {
		log.Fatal(err)
	}
	defer grammar.Close()
	prompt, _ := model.Tokenize("Lily is")
	var text string
	for piece, err := range model.Generate(context.Background(), prompt, &metrale.GenerateOptions{Grammar: grammar}) {
		if err != nil {
			log.Fatal(err)
		}
		text += piece.Text
	}
	var answer struct{ Age int }
	fmt.Println(json.Unmarshal([]byte(text), &answer))
	// Output: <nil>
}

// A stage of one's own among the sampler's.
func ExampleHookStage() {
	ctx := context.Background()
	model := loaded()
	defer model.Close()
	comma, _ := model.TokenizeRaw(",", false)
	never := func(logits []float32, history []metrale.Token) error {
		for _, token := range comma {
			logits[token] -= 1000
		}
		return nil
	}
	seq, err := model.NewSequence(&metrale.SequenceOptions{
		Sampler: &metrale.Sampler{Stages: []metrale.Stage{metrale.HookStage(never), metrale.Greedy()}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer seq.Close()
	prompt, _ := model.Tokenize("Once upon a time")
	if err := seq.Prefill(ctx, prompt); err != nil {
		log.Fatal(err)
	}
	token, _, err := seq.Next(ctx)
	fmt.Println(err, token == comma[len(comma)-1])
	// Output: <nil> false
}

// Errors match their status, and say what was found and expected.
func ExampleError() {
	_, err := metrale.Load(context.Background(), "no-such-model.gguf", nil)
	var detail *metrale.Error
	fmt.Println(errors.Is(err, metrale.ErrNotFound), errors.Is(err, fs.ErrNotExist), errors.As(err, &detail))
	// Output: true true true
}

// The library's log, as records of log/slog.
func ExampleNewRuntime() {
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	levels := map[metrale.LogLevel]slog.Level{
		metrale.LogError: slog.LevelError, metrale.LogWarning: slog.LevelWarn, metrale.LogInfo: slog.LevelInfo, metrale.LogDebug: slog.LevelDebug,
	}
	runtime, err := metrale.NewRuntime(&metrale.RuntimeOptions{
		MemoryCap: 1 << 30,
		LogLevel:  metrale.LogWarning,
		Log:       func(r metrale.Record) { logger.Log(context.Background(), levels[r.Level], r.Text) },
	})
	if err != nil {
		log.Fatal(err)
	}
	defer runtime.Close()
	model, err := metrale.Load(context.Background(), path, &metrale.LoadOptions{Runtime: runtime})
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	usage, err := runtime.Memory()
	fmt.Println(err, usage.Live > 0)
	// Output: <nil> true
}
