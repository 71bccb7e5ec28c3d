// pg-boss. With the policy key_strict_fifo, its singleton keys serve as groups.
import { PgBoss } from 'pg-boss'
import * as adapter from './adapter.mjs'

async function start(max, options = {}) {
  const boss = new PgBoss({ ...adapter.address, max, schedule: false, ...options })
  boss.on('error', (error) => console.error(error.message))
  await boss.start()
  return boss
}

const startSender = (max) => start(max, { supervise: false })

await adapter.run({
  async setup(given) {
    const boss = await start(2)
    const policy = given.policy ?? 'standard'
    await boss.createQueue('noop', { policy, notify: true })
    await boss.stop({ graceful: false })
  },

  async enqueue(given) {
    const boss = await startSender(given.connections)
    await boss.send('noop', { i: 0 })
    await adapter.enqueueFor(given, () => boss.send('noop', { i: 1 }))
  },

  async bulk(given) {
    const boss = await startSender(1)
    await adapter.bulkInSlices(given, 5000, (payloads) =>
      boss.insert(
        'noop',
        payloads.map((data) => ({ data, ...(data.k ? { singletonKey: data.k } : {}) }))
      )
    )
  },

  async work(given) {
    const sink = adapter.makeSink(given)
    const { useListenNotify, ...options } = given.settings
    const boss = await start(10, { useListenNotify })
    await boss.work('noop', options, async (jobs) => {
      for (const job of jobs) sink.note(job.data.i, job.data.k)
    })
    adapter.ready()
  },

  async send(given) {
    const boss = await startSender(given.connections)
    await adapter.sendInTurn(given, (i) => boss.send('noop', { i }))
  }
})
