// Command river is the adapter of River. Commands and output are those of adapter.py.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// Noop is the job that does nothing.
type Noop struct {
	I int `json:"i"`
}

// Kind is its name in the table.
func (Noop) Kind() string { return "noop" }

type noopWorker struct {
	river.WorkerDefaults[Noop]
	sink sink
}

func (w *noopWorker) Work(_ context.Context, job *river.Job[Noop]) error {
	w.sink.note(job.Args.I)
	return nil
}

type given struct {
	Jobs        int        `json:"jobs"`
	Seconds     float64    `json:"seconds"`
	Connections int        `json:"connections"`
	GapMs       [2]float64 `json:"gap_ms"`
	Log         string     `json:"log"`
	Settings    struct {
		MaxWorkers      int `json:"maxWorkers"`
		FetchCooldownMs int `json:"fetchCooldownMs"`
		FetchPollMs     int `json:"fetchPollMs"`
		Pool            int `json:"pool"`
	} `json:"settings"`
}

const bulkSlice = 10_000

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var g given
	if len(os.Args) > 2 {
		if err := json.Unmarshal([]byte(os.Args[2]), &g); err != nil {
			return err
		}
	}
	pool, err := connect(ctx, max(g.Connections, g.Settings.Pool, 2))
	if err != nil {
		return err
	}
	driver := riverpgxv5.New(pool)
	switch os.Args[1] {
	case "setup":
		migrator, err := rivermigrate.New[pgx.Tx](driver, nil)
		if err != nil {
			return err
		}
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
		return err
	case "work":
		return work(ctx, driver, g)
	}
	config := configure(&noopWorker{}, g)
	client, err := river.NewClient(driver, config)
	if err != nil {
		return err
	}
	insert := func(i int) error {
		_, err := client.Insert(ctx, Noop{I: i}, nil)
		return err
	}
	switch os.Args[1] {
	case "enqueue":
		return enqueueFor(g, insert)
	case "send":
		return sendInTurn(g, insert)
	case "bulk":
		return bulk(ctx, client, g.Jobs)
	}
	return fmt.Errorf("there is no command %q", os.Args[1])
}

func connect(ctx context.Context, connections int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig("") // from PGHOST and its like
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(connections)
	config.MinConns = int32(min(connections, 8))
	return pgxpool.NewWithConfig(ctx, config)
}

func configure(worker *noopWorker, g given) *river.Config {
	workers := river.NewWorkers()
	river.AddWorker(workers, worker)
	options := &slog.HandlerOptions{Level: slog.LevelError}
	logger := slog.New(slog.NewTextHandler(os.Stderr, options))
	return &river.Config{
		Logger:  logger,
		Workers: workers,
		// A sender wakes workers no more often than this, either.
		FetchCooldown:     time.Duration(g.Settings.FetchCooldownMs) * time.Millisecond,
		FetchPollInterval: time.Duration(g.Settings.FetchPollMs) * time.Millisecond,
	}
}

func work(ctx context.Context, driver *riverpgxv5.Driver, g given) error {
	sink, err := newSink(g)
	if err != nil {
		return err
	}
	config := configure(&noopWorker{sink: sink}, g)
	config.Queues = map[string]river.QueueConfig{
		river.QueueDefault: {MaxWorkers: g.Settings.MaxWorkers},
	}
	client, err := river.NewClient(driver, config)
	if err != nil {
		return err
	}
	if err := client.Start(ctx); err != nil {
		return err
	}
	say(map[string]any{"event": "ready", "at": now()})
	select {}
}

func bulk(ctx context.Context, client *river.Client[pgx.Tx], jobs int) error {
	began := time.Now()
	for start := 0; start < jobs; start += bulkSlice {
		var many []river.InsertManyParams
		for i := start; i < min(start+bulkSlice, jobs); i++ {
			many = append(many, river.InsertManyParams{Args: Noop{I: i}})
		}
		if _, err := client.InsertManyFast(ctx, many); err != nil {
			return err
		}
	}
	say(map[string]any{"jobs": jobs, "seconds": time.Since(began).Seconds()})
	return nil
}
