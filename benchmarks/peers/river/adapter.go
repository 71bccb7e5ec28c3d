package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"sort"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// now reads CLOCK_MONOTONIC, which Go's own clock does not expose.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err)
	}
	return t.Nano()
}

func say(event map[string]any) {
	line, err := json.Marshal(event)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(line))
}

// sink is the object that the handler calls first.
type sink interface{ note(i int) }

func newSink(g given) (sink, error) {
	if g.Log == "" {
		return &handled{jobs: g.Jobs, seconds: g.Seconds}, nil
	}
	file, err := os.OpenFile(g.Log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	return &startLog{file: file}, err
}

type handled struct {
	mu          sync.Mutex
	jobs        int
	seconds     float64
	count       int
	first, last int64
	ended       bool
}

func (h *handled) note(int) {
	at := now()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.count == 0 {
		h.first = at
		say(map[string]any{"event": "first", "at": at})
		time.AfterFunc(time.Duration(h.seconds*float64(time.Second)), func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.end()
		})
	}
	h.count++
	h.last = max(h.last, at)
	if h.count == h.jobs {
		h.end()
	}
}

func (h *handled) end() {
	if h.ended {
		return
	}
	h.ended = true
	say(map[string]any{"event": "end", "jobs": h.count, "first": h.first, "last": h.last})
}

type startLog struct {
	mu   sync.Mutex
	file *os.File
}

func (s *startLog) note(i int) {
	at := now()
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.file, "%d %d\n", i, at)
}

func enqueueFor(g given, insert func(int) error) error {
	if err := insert(0); err != nil {
		return err
	}
	var mu sync.Mutex
	var all []float64
	began := time.Now()
	err := inParallel(g.Connections, func() error {
		var own []float64
		for time.Since(began).Seconds() < g.Seconds {
			called := time.Now()
			if err := insert(1); err != nil {
				return err
			}
			own = append(own, time.Since(called).Seconds()*1e3)
		}
		mu.Lock()
		defer mu.Unlock()
		all = append(all, own...)
		return nil
	})
	took := time.Since(began).Seconds()
	if err != nil {
		return err
	}
	sort.Float64s(all)
	say(map[string]any{
		"jobs": len(all), "seconds": took,
		"p50_ms": all[len(all)/2], "p99_ms": all[len(all)*99/100],
	})
	return nil
}

func sendInTurn(g given, insert func(int) error) error {
	file, err := os.Create(g.Log)
	if err != nil {
		return err
	}
	log := bufio.NewWriter(file)
	var mu sync.Mutex
	began := time.Now()
	next, due := 0, began
	take := func() (int, time.Time) {
		mu.Lock()
		defer mu.Unlock()
		i, at := next, due
		next++
		gap := g.GapMs[0] + rand.Float64()*(g.GapMs[1]-g.GapMs[0])
		due = due.Add(time.Duration(gap * float64(time.Millisecond)))
		return i, at
	}
	err = inParallel(g.Connections, func() error {
		for {
			i, at := take()
			if i >= g.Jobs || time.Since(began).Seconds() > g.Seconds {
				return nil
			}
			time.Sleep(time.Until(at))
			before := now()
			if err := insert(i); err != nil {
				return err
			}
			after := now()
			mu.Lock()
			fmt.Fprintf(log, "%d %d %d\n", i, before, after)
			mu.Unlock()
		}
	})
	if err != nil {
		return err
	}
	return log.Flush()
}

func inParallel(times int, act func() error) error {
	failures := make(chan error, times)
	for range times {
		go func() { failures <- act() }()
	}
	var failed error
	for range times {
		if err := <-failures; err != nil {
			failed = err
		}
	}
	return failed
}
