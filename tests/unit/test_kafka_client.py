"""Unsafe settings of Kafka's clients are refused."""

from __future__ import annotations

import pytest

from jobs_lib.errors import ConfigurationError
from jobs_lib.kafka.client import check_settings
from jobs_lib.settings import load_settings


@pytest.mark.guarantee("K16")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "1"),
        ("enable.idempotence", "false"),
        ("partitioner", "random"),
        ("isolation.level", "read_uncommitted"),
        ("enable.auto.commit", "true"),
    ],
)
def test_settings_that_would_lose_or_mix_up_records_are_refused(name, value):
    settings = load_settings(kafka_bootstrap_servers="127.0.0.1:1", kafka={name: value})
    with pytest.raises(ConfigurationError, match=f"{name}={value} is refused"):
        check_settings(settings)
