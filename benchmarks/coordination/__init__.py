"""Coordination over a topic of Kafka, beside consumer groups: what each figure is.

| figure | what |
| --- | --- |
| `claim_latency_…` | from a claim of a free partition until its first heartbeat is read back |
| `race_50_winners`, `…_min` | the most and the fewest winners of a race of fifty claims |
| `takeover_intervals_min`, `…_max` | from the last record of a killed holder to the claim of the next one, by the broker's append times |
| `takeover_kill_s`, `handover_clean_ms` | from the signal until another process has a record of each partition; the suffixes are the protocols of a consumer group whose session is as long as two intervals |
| `fold_events_s` | records that are in memory, folded |
| `start_with_1m_events_s` | a start behind so many records, and with a snapshot at their end |
| `log_bytes_an_hour_100_partitions` | what a log grows by on the broker's disk, at the default interval |
| `consume_vs_group` | records of our consumer at least once, times those of a group's member that gives the same records to the same handler in the thread that polls |
| `consume_vs_group_messages` | the same, while that handler gets Kafka's own messages |
| `at_most_once_records_s_batch_…` | records with batches of so many |
| `coordination_messages_per_record_batch_…` | records that the log has grown by meanwhile, for each record that was handled |

`failures` names each measure that has failed, and each figure that is out of its bounds: see `bounds.py`.
"""  # noqa: E501
