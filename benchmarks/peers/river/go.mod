module jobs_lib/benchmarks/river

go 1.24

require (
	github.com/jackc/pgx/v5 v5.12.0
	github.com/riverqueue/river v0.51.0
	github.com/riverqueue/river/riverdriver/riverpgxv5 v0.51.0
	golang.org/x/sys v0.30.0
)
