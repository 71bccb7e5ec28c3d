// graphile-worker. Its queue names serve as groups.
import pg from 'pg'
import * as worker from 'graphile-worker'
import * as adapter from './adapter.mjs'

const logger = new worker.Logger(() => () => {})
const makePool = (max) => new pg.Pool({ ...adapter.address, max })
const makeUtils = (max) => worker.makeWorkerUtils({ pgPool: makePool(max), logger })

await adapter.run({
  async setup() {
    await worker.runMigrations({ pgPool: makePool(2), logger })
  },

  async enqueue(given) {
    const utils = await makeUtils(given.connections)
    await utils.addJob('noop', { i: 0 })
    await adapter.enqueueFor(given, () => utils.addJob('noop', { i: 1 }))
  },

  async bulk(given) {
    const utils = await makeUtils(1)
    await adapter.bulkInSlices(given, 5000, (payloads) =>
      utils.addJobs(
        payloads.map((payload) => ({
          identifier: 'noop',
          payload,
          ...(payload.k ? { queueName: payload.k } : {})
        }))
      )
    )
  },

  async work(given) {
    const sink = adapter.makeSink(given)
    const set = given.settings
    const preset = { worker: { concurrentJobs: set.concurrentJobs } }
    if (set.localQueue) {
      const refetchDelay = { durationMs: set.refetchDelayMs }
      preset.worker.localQueue = { size: set.localQueue, refetchDelay }
      preset.worker.completeJobBatchDelay = set.completeDelayMs
    }
    await worker.run({
      pgPool: makePool(Math.min(set.concurrentJobs + 2, 30)),
      preset,
      logger,
      noHandleSignals: true,
      taskList: { noop: async (payload) => sink.note(payload.i, payload.k) }
    })
    adapter.ready()
  },

  async send(given) {
    const utils = await makeUtils(given.connections)
    await adapter.sendInTurn(given, (i) => utils.addJob('noop', { i }))
  }
})
