module metrale

go 1.24
