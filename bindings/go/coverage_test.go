package metrale

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// elsewhere are the functions of metrale.h that the package has no use for, and what serves instead.
var elsewhere = map[string]string{
	"metrale_load":                    "metrale_load_begin and metrale_load_step, which a context can end",
	"metrale_load_source":             "as metrale_load",
	"metrale_load_step_bytes":         "a goroutine loads",
	"metrale_model_probe":             "metrale_source_probe",
	"metrale_plan":                    "metrale_source_plan",
	"metrale_prefill":                 "metrale_seq_feed and metrale_step, which batch",
	"metrale_decode_step":             "metrale_step",
	"metrale_decode":                  "metrale_step, which batches goroutines that come and go",
	"metrale_step_estimate":           "no frames are drawn",
	"metrale_model_retain":            "the garbage collector",
	"metrale_error_code":              "the status of the call",
	"metrale_error_detail":            "the fields of Error",
	"metrale_version_number":          "Version",
	"metrale_runtime_log_set":         "RuntimeOptions.Log",
	"metrale_runtime_run_worker":      "goroutines have no threads to lend",
	"metrale_runtime_release_workers": "as metrale_runtime_run_worker",
}

func TestEveryFunctionOfTheHeaderHasItsPlace(t *testing.T) {
	header, err := os.ReadFile("../../include/metrale.h")
	must(t, err)
	files, err := filepath.Glob("*.[gc]*")
	must(t, err)
	var code strings.Builder
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		text, err := os.ReadFile(name)
		must(t, err)
		code.Write(text)
	}
	functions := regexp.MustCompile(`(?m)^\w[\w *]*?\b(metrale_\w+)\(`).FindAllStringSubmatch(string(header), -1)
	if len(functions) < 80 {
		t.Fatalf("%d functions in the header", len(functions))
	}
	for _, match := range functions {
		called := regexp.MustCompile(`\b` + match[1] + `\(`).MatchString(code.String())
		if reason, listed := elsewhere[match[1]]; called == listed {
			t.Errorf("%s: called %t, listed as %q", match[1], called, reason)
		}
	}
}

func TestTheProcessorIsADevice(t *testing.T) {
	devices, err := Devices()
	if must(t, err); len(devices) == 0 || devices[0].Kernels == "" || devices[0].Threads < 1 {
		t.Errorf("%+v", devices)
	}
	if !strings.Contains(BuildInfo(), `"version"`) || !strings.Contains(BuildInfo(), Version()) {
		t.Errorf("%s of %s", BuildInfo(), Version())
	}
}
