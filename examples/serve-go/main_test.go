package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"metrale"
)

// started serves the fixture on a free port; end interrupts it, and gives what serve returned.
func started(t *testing.T, grace time.Duration) (url string, model *metrale.Model, end func() error) {
	t.Helper()
	model, err := metrale.Load(context.Background(), "../../tests/fixtures/stories260k/model.gguf", &metrale.LoadOptions{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- serve(ctx, listener, model, grace) }()
	end = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { end(); model.Close() })
	return "http://" + listener.Addr().String() + "/generate", model, end
}

func post(ctx context.Context, url, body string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(r)
}

// read gives the text of a whole stream and its last event.
func read(body io.Reader) (text string, last event, err error) {
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		last = event{}
		if err := json.Unmarshal(data, &last); err != nil {
			return text, last, err
		}
		text += last.Text
	}
	return text, last, lines.Err()
}

func TestManyClientsGetTheirOwnAnswers(t *testing.T) {
	url, model, _ := started(t, time.Second)
	prompts := []string{"Once upon a time", "The dog", "Lily and Tom", "One day"}
	want := map[string]string{}
	for _, prompt := range prompts {
		tokens, err := model.Tokenize(prompt)
		if err != nil {
			t.Fatal(err)
		}
		for piece, err := range model.Generate(context.Background(), tokens, &metrale.GenerateOptions{StreamOptions: metrale.StreamOptions{MaxTokens: 24}}) {
			if err != nil {
				t.Fatal(err)
			}
			want[prompt] += piece.Text
		}
	}
	var group sync.WaitGroup
	for i := range 64 {
		group.Add(1)
		go func() {
			defer group.Done()
			prompt := prompts[i%len(prompts)]
			response, err := post(context.Background(), url, `{"prompt": "`+prompt+`", "max_tokens": 24}`)
			if err != nil {
				t.Error(err)
				return
			}
			defer response.Body.Close()
			text, last, err := read(response.Body)
			if err != nil || text != want[prompt] || last.End != metrale.EndLength || response.Header.Get("Content-Type") != "text/event-stream" {
				t.Errorf("client %d: %q, %+v, %v; expected %q", i, text, last, err, want[prompt])
			}
		}()
	}
	group.Wait()
}

// crowd lets many clients ask for long answers, which leave after their first event or read to the end, and says how long the
// server then had work: a shutdown waits for requests under way.
func crowd(t *testing.T, leave bool) time.Duration {
	t.Helper()
	url, _, end := started(t, time.Minute)
	var first, all sync.WaitGroup
	for range 12 {
		first.Add(1)
		all.Add(1)
		go func() {
			defer all.Done()
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			response, err := post(ctx, url, `{"prompt": "Once upon a time", "max_tokens": 250, "temperature": 3}`)
			if err != nil {
				t.Error(err)
				first.Done()
				return
			}
			defer response.Body.Close()
			data := make([]byte, 6)
			if _, err := io.ReadFull(response.Body, data); err != nil || string(data) != "data: " {
				t.Errorf("%q, %v", data, err)
			}
			first.Done()
			if first.Wait(); !leave {
				_, _ = io.Copy(io.Discard, response.Body)
			}
		}()
	}
	first.Wait()
	began := time.Now()
	all.Wait()
	if err := end(); err != nil {
		t.Error(err)
	}
	return time.Since(began)
}

func TestClientsThatLeaveEndTheirGenerations(t *testing.T) {
	var left, stayed time.Duration
	for range 3 { // other programs may hold one of the two up
		left, stayed = crowd(t, true), crowd(t, false)
		if left < stayed/2 {
			return
		}
	}
	t.Errorf("the server worked for %v after all had left, and for %v where they stayed", left, stayed)
}

func TestAShutdownLetsRequestsFinish(t *testing.T) {
	url, _, end := started(t, time.Minute)
	response, err := post(context.Background(), url, `{"prompt": "Once upon a time", "max_tokens": 100}`)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	ended := make(chan error, 1)
	go func() { ended <- end() }()
	text, last, err := read(response.Body)
	if err != nil || last.End != metrale.EndLength || len(text) < 100 {
		t.Errorf("%q, %+v, %v", text, last, err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if _, err := post(context.Background(), url, `{}`); err == nil {
		t.Error("answers after its shutdown")
	}
}

func TestBadRequestsAreAnswered(t *testing.T) {
	url, _, _ := started(t, time.Second)
	for body, want := range map[string]int{
		`{"prompt"`: http.StatusBadRequest,
		`{"messages": [{"role": "user", "content": "Hi"}]}`: http.StatusUnprocessableEntity, // the fixture has no chat template
	} {
		response, err := post(context.Background(), url, body)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != want {
			t.Errorf("%s: %d, expected %d", body, response.StatusCode, want)
		}
	}
	response, err := post(context.Background(), url, `{"prompt": "`+strings.Repeat("Once upon a time. ", 400)+`"}`)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if _, last, err := read(response.Body); err != nil || !strings.Contains(last.Error, "METRALE_CONTEXT_FULL") {
		t.Errorf("a prompt that does not fit: %+v, %v", last, err)
	}
}
