package metrale

import (
	"context"
	"iter"
	"math"
)

// End says why a stream ended.
type End string

// The ends of a stream.
const (
	EndNone    End = ""        // it goes on
	EndToken   End = "end"     // the model chose a token that ends generation
	EndStop    End = "stop"    // the text reached a stop string, which is not part of it
	EndLength  End = "length"  // MaxTokens were made
	EndContext End = "context" // the sequence is full
	EndGrammar End = "grammar" // the grammar was followed to its end
)

// Piece is what came of one token.
type Piece struct {
	Text    string  // what became certain, whole UTF-8; may be empty
	Token   Token   // [NoToken] where a stream ends without one
	Logprob float32 // of Token, with [SequenceOptions].Logprobs
	End     End     // of the last piece: why
}

// StreamOptions say how far a stream goes. The zero value goes on until the model ends or the sequence is full.
type StreamOptions struct {
	MaxTokens int      // 0 for no limit
	Stops     []string // strings that end the stream before they are seen
	Specials  bool     // show the text of special tokens
}

// ahead is how many tokens are made before their reader wants them, so that one that is late does not hold up the others.
const ahead = 16

// Stream yields the sequence's next tokens as they are made. The sequence must hold a token. The last piece says why the stream
// ended; or an error is yielded, and nothing after it. When ctx ends, the stream ends at once with its error.
//
//	for piece, err := range seq.Stream(ctx, nil) {
//		if err != nil {
//			return err
//		}
//		fmt.Print(piece.Text)
//	}
//
// Tokens are made a little ahead of their reader. After a loop that was left early, or an error, the sequence may hold some that
// were not yielded; mark it before where that matters, or use [Sequence.Next]. While the loop runs the sequence is busy.
func (s *Sequence) Stream(ctx context.Context, options *StreamOptions) iter.Seq2[Piece, error] {
	return func(yield func(Piece, error) bool) {
		if err := s.stream(ctx, options, yield); err != nil {
			yield(Piece{Token: NoToken}, err)
		}
	}
}

func (s *Sequence) stream(ctx context.Context, options *StreamOptions, yield func(Piece, error) bool) error {
	done, err := s.change()
	if err != nil {
		return err
	}
	defer done()
	if options == nil {
		options = &StreamOptions{}
	}
	if options.MaxTokens < 0 {
		return invalid("MaxTokens is %d", options.MaxTokens)
	}
	want := options.MaxTokens
	if want == 0 {
		want = math.MaxInt
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	text, err := s.model.NewText(&TextOptions{Stops: options.Stops, Specials: options.Specials})
	if err != nil {
		return err
	}
	defer text.Close()
	j := s.start(want, ahead, text)
	defer j.end()
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		var piece Piece
		select {
		case piece = <-j.out:
		case <-ctx.Done():
			continue
		case <-j.over:
			select {
			case piece = <-j.out: // what came before the end
			default:
				return j.err
			}
		}
		if len(j.out) == cap(j.out)-1 {
			s.model.stepper.poke()
		}
		if !yield(piece, nil) || piece.End != EndNone {
			return nil
		}
	}
}

// GenerateOptions are those of a sequence and of its stream.
type GenerateOptions struct {
	SequenceOptions
	StreamOptions
	Grammar *Grammar // what the text has to follow, or nil
}

// Generate yields what the model says after a prompt, in a sequence of its own: see [Sequence.Stream]. Any number of goroutines
// may do so at once. options may be nil.
func (m *Model) Generate(ctx context.Context, prompt []Token, options *GenerateOptions) iter.Seq2[Piece, error] {
	return func(yield func(Piece, error) bool) {
		if err := m.generate(ctx, prompt, options, yield); err != nil {
			yield(Piece{Token: NoToken}, err)
		}
	}
}

func (m *Model) generate(ctx context.Context, prompt []Token, options *GenerateOptions, yield func(Piece, error) bool) error {
	if options == nil {
		options = &GenerateOptions{}
	}
	s, err := m.NewSequence(&options.SequenceOptions)
	if err != nil {
		return err
	}
	defer s.Close()
	if options.Grammar != nil {
		if err := s.SetGrammar(options.Grammar); err != nil {
			return err
		}
	}
	if err := s.Prefill(ctx, prompt); err != nil {
		return err
	}
	return s.stream(ctx, &options.StreamOptions, yield)
}
