// Serve answers prompts over HTTP, token by token, for any number of clients at once.
//
//	serve model.gguf
//	curl -N -d '{"prompt": "Once upon a time", "max_tokens": 64}' http://127.0.0.1:8080/generate
//
// The answer is a stream of server-sent events. A client that goes away ends its own generation; an interrupt lets those under
// way finish, and a second one, or ten seconds, ends them.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"metrale"
)

// request is the body of POST /generate.
type request struct {
	Prompt      string            `json:"prompt"`   // a text to continue, or
	Messages    []metrale.Message `json:"messages"` // a conversation to answer
	MaxTokens   int               `json:"max_tokens"`
	Temperature float32           `json:"temperature"`
	Seed        uint64            `json:"seed"`
	Stop        []string          `json:"stop"`
}

// event is what follows "data: " in the stream.
type event struct {
	Text  string      `json:"text,omitempty"`
	End   metrale.End `json:"end,omitempty"`
	Error string      `json:"error,omitempty"`
}

func generate(model *metrale.Model) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ask := request{MaxTokens: 256}
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&ask); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		prompt, err := model.Tokenize(ask.Prompt)
		if len(ask.Messages) > 0 {
			prompt, err = model.ChatTokens(ask.Messages...)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusUnprocessableEntity)
			return
		}
		options := &metrale.GenerateOptions{StreamOptions: metrale.StreamOptions{MaxTokens: ask.MaxTokens, Stops: ask.Stop}}
		if ask.Temperature > 0 {
			options.Sampler = &metrale.Sampler{Seed: ask.Seed, Stages: []metrale.Stage{metrale.Temperature(ask.Temperature), metrale.MinP(0.05)}}
		}
		w.Header().Set("Content-Type", "text/event-stream")
		w.Header().Set("Cache-Control", "no-store")
		for piece, err := range model.Generate(r.Context(), prompt, options) {
			out := event{Text: piece.Text, End: piece.End}
			if err != nil {
				out.Error = err.Error()
			}
			if out == (event{}) {
				continue // a token that has not become text yet
			}
			data, _ := json.Marshal(out)
			if _, err := fmt.Fprintf(w, "data: %s\n\n", data); err != nil {
				return
			}
			w.(http.Flusher).Flush()
		}
	}
}

// serve answers until ctx ends, then lets requests finish for as long as grace, and ends those that are left.
func serve(ctx context.Context, listener net.Listener, model *metrale.Model, grace time.Duration) error {
	mux := http.NewServeMux()
	mux.Handle("POST /generate", generate(model))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if err := server.Shutdown(last); errors.Is(err, context.DeadlineExceeded) {
		return server.Close() // which ends the requests' contexts, and so their generations
	} else {
		return err
	}
}

func main() {
	address := flag.String("listen", "127.0.0.1:8080", "where to listen")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: serve [-listen ADDRESS] MODEL")
		flag.PrintDefaults()
	}
	flag.Parse() // a wrong option shows the usage and exits with 2
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second interrupt ends the process
	model, err := metrale.Load(ctx, flag.Arg(0), &metrale.LoadOptions{PrefixBytes: 64 << 20})
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("metrale %s: %s on http://%s", metrale.Version(), flag.Arg(0), listener.Addr())
	if err := serve(ctx, listener, model, 10*time.Second); err != nil {
		log.Fatal(err)
	}
}
