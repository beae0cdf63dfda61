package main

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"metrale"
)

func load(t *testing.T) *metrale.Model {
	t.Helper()
	model, err := metrale.Load(context.Background(), "../../tests/fixtures/stories260k/model.gguf", &metrale.LoadOptions{Threads: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { model.Close() })
	return model
}

// The fixture tells stories and knows nothing of JSON, so what fits the schema does so because of the grammar.
func TestTheAnswerFollowsTheSchema(t *testing.T) {
	answer, err := extract(context.Background(), load(t), eventSchema, "Lily and Tom meet in the park on Friday at noon.")
	if err != nil {
		t.Fatal(err)
	}
	var event struct {
		Title, Place, Day *string
		Hour              *int
		People            *[]string
	}
	decoder := json.NewDecoder(strings.NewReader(string(answer)))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&event); err != nil || decoder.More() {
		t.Fatalf("%s: %v", answer, err)
	}
	if event.Title == nil || event.Place == nil || event.Day == nil || event.Hour == nil || event.People == nil {
		t.Fatalf("%s lacks something", answer)
	}
	days := []string{"Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "unknown"}
	if !slices.Contains(days, *event.Day) || *event.Hour < 0 || *event.Hour > 23 || len(*event.People) > 5 || len([]rune(*event.Title)) > 60 {
		t.Errorf("%s does not follow the schema", answer)
	}
}

func TestSchemasThatAreNoneAreRefused(t *testing.T) {
	if _, err := extract(context.Background(), load(t), `{"type": "objet"}`, "text"); !errors.Is(err, metrale.ErrInvalidGrammar) {
		t.Errorf("%v", err)
	}
}
