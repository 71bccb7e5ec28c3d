"""The log, the consumer and the commands of docs/coordination.md work as it says."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from confluent_kafka import Producer

from jobs_lib.cli.main import cli
from jobs_lib.coordination import consumer
from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.settings import default_settings
from tests.support.pages import read_blocks, write_modules
from tests.support.topics import create_topic, delete_topics

PAGE = "docs/coordination.md"


def test_the_consumer_of_the_page_handles_records_and_its_commands_work(
    tmp_path, kafka_admin, bootstrap_servers, run_process, monkeypatch
):
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", bootstrap_servers)
    create, operate = read_blocks(PAGE, "sh")
    (command,) = create.splitlines()
    create_topic(kafka_admin, "orders", 1)
    log = command.split()[command.split().index("--log") + 1]
    default_settings.cache_clear()
    try:
        run(command)
        assert write_modules(PAGE, tmp_path) == ["mailer.py"]
        producer = Producer({"bootstrap.servers": bootstrap_servers})
        producer.produce("orders", "value")
        producer.flush(30)
        worker = run_process(
            str(tmp_path / "mailer.py"),
            env={"JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers},
        )
        worker.wait_for_line("^orders 0 0$")
        name, *commands = operate.splitlines()
        assert name == f"export JOBS_LIB_COORDINATION_TOPIC={log}"
        monkeypatch.setenv("JOBS_LIB_COORDINATION_TOPIC", log)
        default_settings.cache_clear()
        for line in commands:
            run(line)
        worker.signal(15)
        assert worker.wait() == 0
    finally:
        default_settings.cache_clear()
        delete_topics(kafka_admin, [log, "orders"])


def run(line: str) -> None:
    """Run a command as the page spells it."""
    name, *words = line.split()
    done = CliRunner().invoke(cli, words)
    assert (name, done.exit_code) == ("jobs-lib", 0), (line, done.output)


def test_the_page_names_the_settings_of_the_log():
    text = Path(PAGE).read_text(encoding="utf-8")
    for name, value in WANTED.items():
        assert f"`{name}={value}`" in text


def test_the_page_names_the_pauses_that_the_code_has():
    text = Path(PAGE).read_text(encoding="utf-8")
    assert (consumer._RETRY.bound(1), consumer._RETRY.cap) == (0.2, 30)
    assert "up to 0.2 seconds at first, and up to 30 in the end" in text


def test_the_protocol_stands_beside_the_code():
    import jobs_lib.coordination as package

    assert package.__file__ is not None
    page = Path(package.__file__).with_name("PROTOCOL.md")
    assert page.read_text(encoding="utf-8").startswith("# The coordination protocol")
