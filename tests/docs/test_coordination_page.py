"""The log and the consumer of docs/coordination.md work as the page says."""

from __future__ import annotations

import shlex
from pathlib import Path

from confluent_kafka import Producer

from jobs_lib.coordination.log_topic import PARTITIONS, WANTED
from tests.support.pages import read_blocks, write_modules
from tests.support.topics import create_topic, delete_topics

PAGE = "docs/coordination.md"


def test_the_consumer_of_the_page_handles_records_with_its_log(
    tmp_path, kafka_admin, bootstrap_servers, run_process
):
    (command,) = read_blocks(PAGE, "sh")
    words = shlex.split(command.replace("\\\n", " "))
    config = dict(one.split("=") for one in words if "=" in one)
    log, partitions = words[words.index("--topic") + 1], words[words.index("8")]
    assert (config, int(partitions)) == (WANTED, PARTITIONS)
    create_topic(kafka_admin, log, int(partitions), config)
    create_topic(kafka_admin, "orders", 1)
    try:
        assert write_modules(PAGE, tmp_path) == ["mailer.py"]
        producer = Producer({"bootstrap.servers": bootstrap_servers})
        producer.produce("orders", "value")
        producer.flush(30)
        worker = run_process(
            str(tmp_path / "mailer.py"),
            env={"JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers},
        )
        worker.wait_for_line("^orders 0 0$")
        worker.signal(15)
        assert worker.wait() == 0
    finally:
        delete_topics(kafka_admin, [log, "orders"])


def test_the_protocol_stands_beside_the_code():
    import jobs_lib.coordination as package

    assert package.__file__ is not None
    page = Path(package.__file__).with_name("PROTOCOL.md")
    assert page.read_text(encoding="utf-8").startswith("# The coordination protocol")
