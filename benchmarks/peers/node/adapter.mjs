// The parts that Node adapters share. Commands and output are those of adapter.py.
import fs from 'node:fs'

const SMALL_GROUPS = 1000
const nowNs = () => process.hrtime.bigint() // CLOCK_MONOTONIC
const seconds = () => Number(nowNs()) / 1e9
const sleep = (ms) => new Promise((done) => setTimeout(done, ms))

export const address = {
  host: process.env.PGHOST,
  port: Number(process.env.PGPORT),
  user: process.env.PGUSER,
  password: process.env.PGPASSWORD,
  database: process.env.PGDATABASE
}

export const say = (event) =>
  fs.writeSync(
    1,
    JSON.stringify(event, (_, v) => (typeof v === 'bigint' ? Number(v) : v)) + '\n'
  )

export const ready = () => say({ event: 'ready', at: nowNs() })

function groupOf(i, mode) {
  if (mode === 'groups') return `g${i % SMALL_GROUPS}`
  if (mode === 'hot') return i % 2 ? 'hot' : `g${(i >> 1) % SMALL_GROUPS}`
  return undefined
}

export function payloadOf(i, mode) {
  const k = groupOf(i, mode)
  return k === undefined ? { i } : { i, k }
}

class Handled {
  constructor(jobs, limit) {
    Object.assign(this, { jobs, limit, count: 0, hot: 0, ended: false })
    Object.assign(this, { first: 0n, last: 0n, hotLast: 0n, smallLast: 0n })
  }

  note(i, k) {
    const now = nowNs()
    if (this.count++ === 0) {
      this.first = now
      say({ event: 'first', at: now })
      setTimeout(() => this.end(), this.limit * 1000).unref()
    }
    this.last = now
    if (k === 'hot') {
      this.hot++
      this.hotLast = now
    } else if (k !== undefined) this.smallLast = now
    if (this.count === this.jobs) this.end()
  }

  end() {
    if (this.ended) return
    this.ended = true
    say({
      event: 'end',
      jobs: this.count,
      first: this.first,
      last: this.last,
      hot: this.hot,
      hot_last: this.hotLast,
      small_last: this.smallLast
    })
  }
}

class StartLog {
  constructor(path) {
    this.file = fs.openSync(path, 'a')
  }

  note(i) {
    const now = nowNs()
    fs.writeSync(this.file, `${i} ${now}\n`)
  }
}

export const makeSink = (given) =>
  given.log ? new StartLog(given.log) : new Handled(given.jobs, given.seconds)

export async function enqueueFor(given, enqueue) {
  const latencies = []
  const began = seconds()
  const one = async () => {
    for (;;) {
      const called = seconds()
      if (called >= began + given.seconds) return
      await enqueue()
      latencies.push((seconds() - called) * 1e3)
    }
  }
  await Promise.all(Array.from({ length: given.connections }, one))
  const took = seconds() - began
  latencies.sort((a, b) => a - b)
  say({
    jobs: latencies.length,
    seconds: took,
    p50_ms: latencies[latencies.length >> 1],
    p99_ms: latencies[Math.floor(latencies.length * 0.99)]
  })
}

export async function bulkInSlices(given, slice, insert) {
  const began = seconds()
  for (let start = 0; start < given.jobs; start += slice) {
    const payloads = []
    const end = Math.min(start + slice, given.jobs)
    for (let i = start; i < end; i++) payloads.push(payloadOf(i, given.mode))
    await insert(payloads)
  }
  say({ jobs: given.jobs, seconds: seconds() - began })
}

export async function sendInTurn(given, send) {
  const log = fs.openSync(given.log, 'w')
  const [low, high] = given.gap_ms
  let next = 0
  const began = seconds()
  let due = began
  const one = async () => {
    while (next < given.jobs && seconds() < began + given.seconds) {
      const i = next++
      const at = due
      due += (low + Math.random() * (high - low)) / 1e3
      const early = at - seconds()
      if (early > 0) await sleep(early * 1e3)
      const before = nowNs()
      await send(i)
      fs.writeSync(log, `${i} ${before} ${nowNs()}\n`)
    }
  }
  await Promise.all(Array.from({ length: given.connections }, one))
}

export async function run(commands) {
  const [command, given] = process.argv.slice(2)
  await commands[command](given ? JSON.parse(given) : {})
  if (command !== 'work') process.exit(0)
}
