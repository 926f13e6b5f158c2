"""safetensors files: ours are read by the library and the other way round; damage is named."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from rlhf_jax.hf.safetensors_io import read_header, split_shards, write_file

ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.float16),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(2.5, np.float64),
    "bytes": np.arange(7, dtype=np.uint8),
}


def write_raw(file, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def test_the_librarys_files_are_read(tmp_path):
    save_file(ARRAYS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        view = found[name].view()
        assert view.dtype == array.dtype
        assert view.shape == array.shape
        np.testing.assert_array_equal(view, array)


def test_the_library_reads_our_files(tmp_path):
    entries = {name: (array.dtype, array.shape) for name, array in ARRAYS.items()}
    write_file(tmp_path / "x.safetensors", entries, ARRAYS.items())
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == ARRAYS.keys()
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_bfloat16_survives(tmp_path):
    array = np.arange(6).reshape(2, 3).T.astype(ml_dtypes.bfloat16)
    write_file(tmp_path / "x.safetensors", {"w": (array.dtype, (3, 2))}, [("w", array)])
    view = read_header(tmp_path / "x.safetensors")["w"].view()
    assert view.dtype == array.dtype
    np.testing.assert_array_equal(view.astype(np.float32), array.astype(np.float32))


def entry(shape, first, last, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": entry([2], 0, 8), "v": entry([2], 8, 16)}, "truncated: v ends at byte"),
        ({"w": entry([3], 0, 8)}, "w of shape .3. and dtype F32 needs 12 bytes"),
        ({"w": entry([-2], 0, 8)}, "the entry of w is damaged"),
        ({"w": entry([2], -8, 0)}, "the entry of w is damaged"),
        ({"w": entry([2], 0, 8, "F8_E4M3")}, "w has dtype F8_E4M3"),
        ({"w": {"dtype": "F32"}}, "the entry of w is damaged"),
        (b'{"w":1,"w":2}', "w is there twice"),
        (b"{not json", "is not JSON"),
        (b"[]", "is not a JSON object"),
    ],
)
def test_damage_is_named(header, message, tmp_path):
    file = write_raw(tmp_path / "x.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=message) as error:
        read_header(file)
    assert "x.safetensors" in str(error.value)


def test_a_file_that_is_none_is_named(tmp_path):
    file = tmp_path / "x.safetensors"
    for content in (b"", b"abc", (10**9).to_bytes(8, "little") + b"{}"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.safetensors is not a safetensors file"):
            read_header(file)


def test_a_pointer_of_git_lfs_is_told(tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(ValueError, match=r"x\.safetensors is a pointer of Git LFS"):
        read_header(file)


def test_shards_keep_order_and_stay_below_the_limit():
    sizes = {"a": 3, "b": 3, "c": 9, "d": 1}
    assert list(split_shards(sizes, 6)) == [["a", "b"], ["c"], ["d"]]
