"""Tables of an earlier revision, upgraded again."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text

from jobs_lib.postgres.migrate import migrate
from jobs_lib.postgres.revisions import migrations_path
from tests.support.engines import sqlalchemy_url


def makes_index(url: str, before: str, statements: list[str], index: str) -> bool:
    """Whether an upgrade makes an index on tables that the statements have filled.

    Args:
        url: of an empty database.
        before: the revision that lacks the index.
        statements: executed on the tables of that revision.
        index: its name.
    """
    migrate(url)
    engine = create_engine(sqlalchemy_url(url))
    config = Config()
    config.set_main_option("script_location", str(migrations_path()))
    with engine.begin() as connection:
        config.attributes |= {"connection": connection, "schema": "jobs_lib"}
        command.downgrade(config, before)
        for statement in statements:
            connection.execute(text(statement))
    migrate(url)
    with engine.connect() as connection:
        there = text(f"select to_regclass('jobs_lib.{index}') is not null")
        found = connection.execute(there).scalar_one()
    engine.dispose()
    return bool(found)
