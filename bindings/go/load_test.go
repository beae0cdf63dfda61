package metrale

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
)

func TestSourcesGiveTheSameModel(t *testing.T) {
	file, err := os.ReadFile(fixture)
	must(t, err)
	// The model inside a container, at an odd place.
	container, err := os.Create(t.TempDir() + "/container")
	must(t, err)
	defer container.Close()
	_, err = container.Write(append([]byte("1234567"), append(bytes.Clone(file), "tail"...)...))
	must(t, err)

	path := load(t, nil)
	want := next(t, prompted(t, path, nil, "Once upon a time"), 8)
	fingerprint, err := path.Fingerprint()
	must(t, err)
	for name, open := range map[string]func() (*Source, error){
		"read path": func() (*Source, error) { return ReadPathSource(fixture) },
		"bytes":     func() (*Source, error) { return BytesSource(file) },
		"file":      func() (*Source, error) { return FileSource(container, 7, uint64(len(file))) },
		"reader":    func() (*Source, error) { return ReaderSource(bytes.NewReader(file), int64(len(file))) },
		"folder": func() (*Source, error) {
			folder, err := FolderSource()
			must(t, err)
			part, err := ReaderSource(bytes.NewReader(file), int64(len(file)))
			must(t, err)
			must(t, folder.Add("model.gguf", part))
			return folder, part.Close()
		},
	} {
		source, err := open()
		must(t, err)
		text, err := source.Probe()
		if must(t, err); !strings.Contains(text, "llama") {
			t.Errorf("%s: probed as %s", name, text)
		}
		m, err := LoadSource(context.Background(), source, nil)
		must(t, err)
		must(t, source.Close())
		must(t, source.Close())
		same(t, name, next(t, prompted(t, m, nil, "Once upon a time"), 8), want)
		if other, err := m.Fingerprint(); err != nil || other != fingerprint {
			t.Errorf("%s: fingerprint %s, expected %s; %v", name, other, fingerprint, err)
		}
		must(t, m.Close())
	}
}

var errDisk = errors.New("the disk is on fire")

type burning struct{ good int64 }

func (b burning) ReadAt(p []byte, at int64) (int, error) {
	if at+int64(len(p)) > b.good {
		return 0, errDisk
	}
	file, err := os.Open(fixture)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	return file.ReadAt(p, at)
}

type panicking struct{ io.ReaderAt }

func (panicking) ReadAt([]byte, int64) (int, error) { panic("no disk at all") }

func TestWhatAReaderSaysIsInTheError(t *testing.T) {
	for _, c := range []struct {
		from io.ReaderAt
		want string
	}{{burning{600_000}, errDisk.Error()}, {panicking{}, "no disk at all"}, {strings.NewReader("short"), "EOF"}} {
		source, err := ReaderSource(c.from, 1054464)
		must(t, err)
		_, err = LoadSource(context.Background(), source, nil)
		if !errors.Is(err, ErrIO) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%T: %v", c.from, err)
		}
		if c.want == errDisk.Error() && !errors.Is(err, errDisk) {
			t.Errorf("the reader's error is not in the chain of %v", err)
		}
		must(t, source.Close())
		if _, err := LoadSource(context.Background(), source, nil); !errors.Is(err, ErrInvalidHandle) {
			t.Errorf("a closed source: %v", err)
		}
	}
}

func TestLoadsReportAndAreCancelled(t *testing.T) {
	var phases []string
	m := load(t, &LoadOptions{Progress: func(p Progress) {
		if len(phases) == 0 || phases[len(phases)-1] != p.Phase {
			phases = append(phases, p.Phase)
		}
	}})
	must(t, m.Close())
	same(t, "phases", phases[max(0, len(phases)-2):], []string{"weights", "done"})

	ctx, cancel := context.WithCancel(context.Background())
	_, err := Load(ctx, fixture, &LoadOptions{Progress: func(Progress) { cancel() }})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled by its progress: %v", err)
	}
	if _, err := Load(ctx, fixture, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled before: %v", err)
	}
	_, err = Load(context.Background(), fixture, &LoadOptions{Progress: func(Progress) { panic("drawing failed") }})
	if !errors.Is(err, ErrCancelled) || !strings.Contains(err.Error(), "drawing failed") {
		t.Errorf("a progress that panics: %v", err)
	}
}

func TestPlansAndRuntimes(t *testing.T) {
	plan, err := Plan(fixture, &LoadOptions{Precision: "head=f32"}, 2)
	must(t, err)
	if sum := plan.Weights + plan.KV + plan.State + plan.Scratch + plan.Other + plan.Source; plan.Weights == 0 || sum != plan.Total {
		t.Errorf("%+v adds up to %d", plan, sum)
	}
	records := make(chan Record, 1000)
	r, err := NewRuntime(&RuntimeOptions{Threads: 1, LogLevel: LogDebug, Log: func(r Record) {
		Version() // the library may be called here
		records <- r
	}})
	must(t, err)
	m := load(t, &LoadOptions{Runtime: r})
	usage, err := r.Memory()
	if must(t, err); usage.Weights == 0 || usage.Live < usage.Weights || usage.Peak < usage.Live {
		t.Errorf("%+v", usage)
	}
	must(t, r.Trim())
	if _, err := m.Meta("no.such.key"); !errors.Is(err, ErrNotFound) {
		t.Errorf("an unknown key: %v", err)
	}
	levels := map[LogLevel]int{}
	for len(records) > 0 {
		record := <-records
		levels[record.Level]++
		if record.Level == LogError && !errors.Is(record.Err, ErrNotFound) {
			t.Errorf("%+v", record)
		}
	}
	if levels[LogInfo] == 0 || levels[LogError] != 1 {
		t.Errorf("records by level: %v", levels)
	}
	must(t, r.Close())
	must(t, r.Close())
	if _, err := r.Memory(); !errors.Is(err, ErrInvalidHandle) {
		t.Errorf("a closed runtime: %v", err)
	}

	small, err := NewRuntime(&RuntimeOptions{MemoryCap: 100_000})
	must(t, err)
	defer small.Close()
	if _, err := Load(context.Background(), fixture, &LoadOptions{Runtime: small}); !errors.Is(err, ErrOutOfMemory) {
		t.Errorf("a cap of 100 kB: %v", err)
	}
}
