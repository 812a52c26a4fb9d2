"""What the tests of schedules share: texts, with the cache of their tokens."""

from pathlib import Path

import pytest

from support.curricula_runs import prepare_texts


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("texts")
    prepare_texts(home)
    return home
