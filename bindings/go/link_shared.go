//go:build !metrale_static

package metrale

// A file for each way to link, since Go's build cache tells builds apart by their files and not by their tags.

// #cgo pkg-config: metrale
import "C"
