"""Check the server: privileges, autovacuum, old transactions, and poolers."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from jobs_lib.operating.checks.finding import Finding, names
from jobs_lib.operating.session import find_patience
from jobs_lib.postgres.values import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib.operating.checks.finding import Target

_TRIES = 5


def check_privileges(target: Target) -> Iterator[Finding]:
    """Check that the role of a running service has the rights that it needs."""
    ((current, there),) = target.rows("check_role", role=target.role)
    role = target.role or current
    if target.role is not None and not there:
        yield Finding(
            "error", "privileges", f"there is no role {role!r}", "create role …"
        )
        return
    lacking = [
        f"{privilege} on {thing}"
        for privilege, thing in target.rows(
            "check_privileges", role=role, schema=target.database.schema
        )
    ]
    if lacking:
        yield Finding(
            "error",
            "privileges",
            f"the role {role} lacks {names(lacking)}",
            f"jobs-lib grants service {shlex.quote(role)} --apply, or another kind",
        )


def check_functions(target: Target) -> Iterator[Finding]:
    """Check that functions use our tables only, and lend nobody their owner's rights.

    `jobs-lib migrate` sets both; a finding means that they were changed by hand since.
    """
    schema = quote(target.database.schema)
    for kind, name, owner in target.rows(
        "check_functions", schema=target.database.schema
    ):
        what, way_out = {
            "path": (
                f"the function {name} finds a session's temporary tables before ours",
                f"alter routine {name} set search_path = {schema}, pg_temp",
            ),
            "everybody": (
                f"everybody may call {name}, which has the rights of {owner}",
                f"revoke execute on routine {name} from public",
            ),
            "create": (
                f"everybody may create functions for ours to call in the schema {name}",
                f"revoke create on schema {schema} from public",
            ),
        }[kind]
        yield Finding("error", "functions", what, way_out)


def check_autovacuum(target: Target) -> Iterator[Finding]:
    """Check that autovacuum runs often enough, for every table."""
    settings = dict(target.rows("check_settings"))
    for name in ("autovacuum", "track_counts"):
        if settings.get(name) == "off":
            yield Finding(
                "error",
                "autovacuum",
                f"{name} is off: finished jobs are never cleared away",
                f"alter system set {name} = on; select pg_reload_conf()",
            )
    naptime = float(settings.get("autovacuum_naptime", 0))
    if naptime > target.limits.naptime:
        yield Finding(
            "warn",
            "autovacuum",
            f"autovacuum_naptime is {naptime:g} s: dead rows of jobs that finished "
            "meanwhile slow down all others",
            "alter system set autovacuum_naptime = '10s'; select pg_reload_conf()",
        )
    for (table,) in target.rows("check_table_options", schema=target.database.schema):
        name = f"{quote(target.database.schema)}.{quote(table)}"
        yield Finding(
            "error",
            "autovacuum",
            f"autovacuum is switched off for the table {table}",
            f"alter table {name} reset (autovacuum_enabled)",
        )


def check_transactions(target: Target) -> Iterator[Finding]:
    """Check that no transaction is so old that dead rows pile up behind it."""
    for kind, age, who, application, state in target.rows("check_transactions"):
        if age < target.limits.old_transaction:
            continue
        prepared = kind != "transaction"
        yield Finding(
            "error" if age >= 10 * target.limits.old_transaction else "warn",
            "oldest transaction",
            f"{kind} {who} of {application} is open for {age:,.0f} s ({state}): dead "
            "rows stay as long as it is",
            f"rollback prepared '{who}'"
            if prepared
            else "end it there, or select pg_terminate_backend("
            f"{who}); set idle_in_transaction_session_timeout for its role",
        )
    ((sees,),) = target.rows("check_sight")
    if not sees:
        yield Finding(
            "warn",
            "oldest transaction",
            "this role does not see the transactions of other roles",
            f"grant pg_read_all_stats to {target.connection.info.user}",
        )
    slots = [slot for (slot,) in target.rows("check_slots")]
    if slots:
        yield Finding(
            "warn",
            "oldest transaction",
            f"replication slots that nobody reads hold dead rows: {names(slots)}",
            "start their readers, or select pg_drop_replication_slot(…)",
        )


def check_multixacts(target: Target) -> Iterator[Finding]:
    """Check that no vacuum of the whole database will soon be forced."""
    ((age, forced),) = target.rows("check_multixacts")
    share = age / forced
    if share < target.limits.multixacts:
        return
    yield Finding(
        "error" if share >= max(2.0, 2.5 * target.limits.multixacts) else "warn",
        "multixacts",
        f"the database's oldest multixact is {age:,} old. From {forced:,} on "
        "(autovacuum_multixact_freeze_max_age) autovacuum reads every table",
        f"vacuumdb --min-mxid-age={age // 2} at a quiet hour: see operating.md",
    )


def check_pooler(target: Target) -> Iterator[Finding]:
    """Name a pooler, and what it changes."""
    served: dict[int, set[int]] = {}
    with target.database.connect(
        "check", answer_within=find_patience(target.database)
    ) as other:
        for n in range(2 * _TRIES):
            connection = (target.connection, other)[n % 2]
            row = connection.execute(
                target.database.queries["backend_pid"], prepare=False
            ).fetchone()
            served.setdefault(row[0] if row else 0, set()).add(n % 2)
    # Both connections were open all the time: one backend can only have served both if
    # a pooler reassigns it at the end of each transaction.
    transaction = any(len(which) == 2 for which in served.values())
    direct = target.connection.info.backend_pid in served
    if transaction:
        yield Finding(
            "warn",
            "pooler",
            "a pooler in transaction mode (PgBouncer) lies in between: settings of a "
            "session, prepared statements and LISTEN do not outlast a transaction",
            ("set JOBS_LIB_PGBOUNCER=true; " if target.database.prepares else "")
            + "set timeouts and jit = off with alter role … set; let PgBouncer be "
            "1.21 or newer with max_prepared_statements above 0",
        )
    elif not direct:
        yield Finding(
            "ok", "pooler", "a pooler in session mode lies in between: nothing changes"
        )
