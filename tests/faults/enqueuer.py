"""A process that changes something and enqueues a job, and then stands still."""

from __future__ import annotations

import sys
import threading

import psycopg

from tests.support.apps import make_app
from tests.support.say import say

if __name__ == "__main__":
    url, point = sys.argv[1:]
    app = make_app(url)

    @app.job()
    def quick(job, n: int) -> None: ...

    with psycopg.connect(url) as connection:
        connection.execute("insert into effects values (1)")
        quick.enqueue(connection, n=1)
        if point == "after":
            connection.commit()
        say("inside")
        threading.Event().wait()
