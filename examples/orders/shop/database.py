"""The shop's own tables, and its engines: SQLAlchemy, sync and async, with psycopg."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from datetime import datetime  # noqa: TC003 - SQLAlchemy reads it
from typing import TYPE_CHECKING

from sqlalchemy import URL, DateTime, create_engine, func, make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

sessions = sessionmaker[Session]()
async_sessions = async_sessionmaker[AsyncSession]()


class Base(DeclarativeBase):
    """The tables with which Alembic compares the database."""


class Order(Base):
    """An order; each change gives it the next version."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(index=True)
    cents: Mapped[int]
    state: Mapped[str] = mapped_column(default="placed")
    placed_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), server_default=func.now()
    )
    version: Mapped[int] = mapped_column()

    # SQLAlchemy counts the version. It refuses to change a row that has changed since
    # its read.
    __mapper_args__ = {"version_id_col": version}


class Total(Base):
    """The sum that a customer has paid."""

    __tablename__ = "totals"

    customer: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int]


class Parcel(Base):
    """An order to pack."""

    __tablename__ = "parcels"

    order_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


def read_url() -> URL:
    """The URL of the database for SQLAlchemy: with psycopg, sync and async."""
    url = make_url(os.environ["JOBS_LIB_DATABASE_URL"])
    return url.set(drivername="postgresql+psycopg")


@asynccontextmanager
async def connected() -> AsyncIterator[None]:
    """Open both engines while the block runs."""
    engine, async_engine = create_engine(read_url()), create_async_engine(read_url())
    sessions.configure(bind=engine)
    async_sessions.configure(bind=async_engine)
    try:
        yield
    finally:
        engine.dispose()
        await async_engine.dispose()
