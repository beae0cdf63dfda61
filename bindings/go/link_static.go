//go:build metrale_static

package metrale

// #cgo pkg-config: metrale-static
import "C"
