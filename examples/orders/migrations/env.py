"""The connection of ``alembic`` to the shop's tables."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine

from shop.database import Base, read_url

with create_engine(read_url()).connect() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata)
    with context.begin_transaction():
        context.run_migrations()
