module serve

go 1.24

require metrale v0.0.0

replace metrale => ../../bindings/go
