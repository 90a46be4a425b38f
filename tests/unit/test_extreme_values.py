"""Values at the far end of what a type can hold are typed errors, or work."""

import pytest

from minice import CrossEncoder
from minice.artifacts.store import LARGEST_FILE, read_unpinned
from minice.errors import ConfigError, InputError


def test_deadlines_beyond_every_clock():
    with CrossEncoder.open(threads=1) as encoder:
        assert len(encoder.answer("q", ["p"], deadline=1e300).values) == 1
        with pytest.raises(InputError) as caught:
            encoder.answer("q", ["p"], deadline=10**400)
        assert caught.value.where == "deadline"


def test_a_folder_that_no_file_system_can_name():
    with pytest.raises(ConfigError, match="no file system can name"):
        CrossEncoder.open(model_dir="\ud800")


def test_a_file_larger_than_onnx_can_be_is_refused_unread(tmp_path):
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)  # sparse
    with pytest.raises(InputError, match="too long"):
        read_unpinned(path)
