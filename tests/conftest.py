"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The session's pool of gloo ranks; its process starts with the first case."""
    pool = Pool()
    yield pool
    pool.close()
