"""Write minice/cli/demo.json: the demo's notes and queries, and BM25's ranking of them.

Run: python tools/make_demo.py

The texts were written before any of them was scored and were not changed to suit a ranking: what the demo
shows, good or bad, is what the two rankings make of them.
"""

import json
from pathlib import Path

import bm25s
import numpy as np

TARGET = Path(__file__).parent.parent / "minice" / "cli" / "demo.json"

NOTES = (
    "Undid yesterday's botched commit on the billing branch with git reset --soft HEAD~1; the changes stayed staged.",
    "Commit messages in this team: imperative, 50 characters, ticket number at the end of the last line.",
    "The last commit before each release is tagged by the release manager, never by CI.",
    "git stash push -m 'wip' before switching branches; git stash pop brings the changes back.",
    "git reflog lists where HEAD has been for 90 days, so work that looks lost after a hard reset can be fetched back.",
    "Postgres on staging refused connections: max_connections was 100 and the workers keep 12 each. "
    "Put PgBouncer in front of it.",
    "To find which process holds a port: ss -ltnp on Linux, lsof -i :8080 on the Mac.",
    "The staging database is rebuilt from an anonymized dump every Sunday at 03:00; anything typed in there is gone.",
    "Migration 0042 locks the orders table for about four minutes. Run it at night, with lock_timeout set.",
    "Ana prefers review comments in the pull request, not in chat, and answers in the morning.",
    "The login page was slow because every request read the feature flags from disk; caching them for 30 s fixed it.",
    "Our API keys rotate on the first Monday of the month. The old one keeps working for 24 hours.",
    "If the deploy hangs at 'waiting for rollout', look at the readiness probe first: "
    "last time the new pod had no database password.",
    "Docker filled the disk of the build machine again: docker system prune -af --volumes freed 60 GB.",
    "Cron on the old server runs in UTC, the office calendar does not; the report job is an hour late in summer.",
    "TLS certificates come from certbot and renew by a systemd timer; check with systemctl list-timers.",
    "Tests that use the clock must freeze it. The invoice test failed on 29 February.",
    "Bread that worked: 500 g flour, 350 g water, 10 g salt, a spoon of starter, 14 hours at room temperature.",
    "Train to Utrecht: the 07:42 is full on Tuesdays, the 07:57 has seats.",
    "Standing desk: 112 cm for typing, 118 cm for reading.",
)

QUERIES = (
    "how do I undo the last commit",
    "why can't the service connect to the database",
    "the machine is out of disk space, what helped last time",
)


def first_stage(query: str) -> list[list[float]]:
    """Return ``[index, score]`` of every note that shares a word with the query, best first.

    Lower-cased words of two letters or more, English stop words taken out, no stemming; Lucene's BM25
    with k1 = 1.5 and b = 0.75, which are bm25s's defaults. Equal scores keep the order of the notes.
    """
    retriever = bm25s.BM25()
    retriever.index(bm25s.tokenize(list(NOTES), stopwords="en", show_progress=False), show_progress=False)
    words = bm25s.tokenize(query, stopwords="en", show_progress=False, return_ids=False)[0]
    scores = retriever.get_scores(words)
    order = np.argsort(-scores, kind="stable")
    return [[int(i), round(float(scores[i]), 4)] for i in order if scores[i] > 0]


def demo() -> dict[str, object]:
    """Return everything that the demo's file holds."""
    return {
        "first_stage": "BM25 (bm25s, English stop words, no stemming)",
        "notes": list(NOTES),
        "queries": [{"query": query, "first_stage": first_stage(query)} for query in QUERIES],
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(demo(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}")
