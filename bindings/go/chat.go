package metrale

// #include "shim.h"
import "C"

import (
	"encoding/json"
	"runtime"
)

// Message is one message of a conversation.
type Message struct {
	Role    string `json:"role"` // "system", "user", "assistant", "tool"
	Content string `json:"content"`
	// What some templates read besides; left out when empty.
	Name       string `json:"name,omitempty"`
	ToolCalls  any    `json:"tool_calls,omitempty"`
	ToolCallID string `json:"tool_call_id,omitempty"`
}

// Chat is a conversation to be rendered for a model.
type Chat struct {
	Messages  []Message
	Tools     []any          // descriptions of functions that the model may call, as its template expects them
	Variables map[string]any // handed to the template by name
	Continue  bool           // go on with the last message, instead of beginning an answer
}

// RenderChat makes the prompt that the model's chat template makes of a conversation. [ErrNotFound] for a model without a
// template, [ErrTemplate] with the template's own words where it refuses.
func (m *Model) RenderChat(chat Chat) (string, error) {
	defer runtime.KeepAlive(m)
	messages := chat.Messages
	if messages == nil {
		messages = []Message{}
	}
	request := map[string]any{"messages": messages, "add_generation_prompt": !chat.Continue}
	if len(chat.Tools) > 0 {
		request["tools"] = chat.Tools
	}
	if len(chat.Variables) > 0 {
		request["variables"] = chat.Variables
	}
	text, err := json.Marshal(request)
	if err != nil {
		return "", err
	}
	out, err := sized(2*len(text)+1024, func(out *byte, room C.size_t, size *C.size_t, err **C.metrale_error) C.metrale_status {
		return C.metrale_chat_render(m.handle, (*C.uint8_t)(&text[0]), C.size_t(len(text)), (*C.uint8_t)(out), room, size, err)
	})
	return string(out), err
}

// ChatTokens renders a conversation and tokenizes it: what to [Sequence.Prefill].
func (m *Model) ChatTokens(messages ...Message) ([]Token, error) {
	prompt, err := m.RenderChat(Chat{Messages: messages})
	if err != nil {
		return nil, err
	}
	return m.TokenizeRaw(prompt, true)
}
