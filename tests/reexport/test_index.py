"""The index of the rows of re-exports, on tables of the release before."""

from __future__ import annotations

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text

from jobs_lib.postgres.migrate import migrate
from jobs_lib.postgres.revisions import migrations_path
from tests.support.engines import sqlalchemy_url


@pytest.mark.guarantee("J27")
@pytest.mark.parametrize("rows", [10, 40_000], ids=["small", "large"])
def test_the_index_is_only_made_while_the_outbox_is_small(empty_url, rows):
    """While it is made, nobody can publish; a large one takes too long."""
    migrate(empty_url)
    engine = create_engine(sqlalchemy_url(empty_url))
    config = Config()
    config.set_main_option("script_location", str(migrations_path()))
    with engine.begin() as connection:
        config.attributes |= {"connection": connection, "schema": "jobs_lib"}
        command.downgrade(config, "0025_streams")
        # Few rows to a page, so that few make a large table.
        connection.execute(text("alter table jobs_lib.outbox set (fillfactor = 10)"))
        connection.execute(
            text(
                "insert into jobs_lib.outbox (shard, topic, value)"
                " select 0, 'states', convert_to(repeat('v', 200), 'utf8')"
                f" from generate_series(1, {rows})"
            )
        )
    migrate(empty_url)
    with engine.connect() as connection:
        there = text("select to_regclass('jobs_lib.outbox_of_reexport') is not null")
        assert connection.execute(there).scalar_one() is (rows == 10)
    engine.dispose()
