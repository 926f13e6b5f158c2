"""PyTorch's format without PyTorch: real files are read, and nothing else is run."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest

from rlhf_jax.hf.pickle_reader import read_pickle
from rlhf_jax.hf.pickle_writer import write_pickle


def test_views_parameters_and_scalars_are_read(golden):
    """The file was written by torch.save; all but the last two share one storage."""
    found = {name: tensor.view() for name, tensor in read_pickle(golden("odd.bin")).items()}
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(found["whole"], base)
    np.testing.assert_array_equal(found["transposed"], base.T)
    np.testing.assert_array_equal(found["window"], base[1:3, 2:5])
    assert found["scalar"].shape == ()
    assert found["scalar"] == 2.5
    assert found["parameter"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found["parameter"].astype(np.int32), [0, 1, 2])
    np.testing.assert_array_equal(found["integers"], [0, 1, 2, 3])
    assert not found["whole"].flags.writeable


def test_the_format_before_1_6_says_what_to_do(golden):
    with pytest.raises(ValueError, match=r"legacy\.bin is not a zip archive.*save it again"):
        read_pickle(golden("legacy.bin"))


def test_our_files_are_read_again(tmp_path):
    arrays = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float16)}
    entries = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_pickle(tmp_path / "x.bin", entries, arrays.items())
    found = read_pickle(tmp_path / "x.bin")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name].view(), array)


def archive(file, content, storages=(), compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(file, "w", compression) as target:
        target.writestr("archive/data.pkl", content)
        for key, data in storages:
            target.writestr(f"archive/data/{key}", data)
    return file


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_pickle_that_calls_anything_else_is_refused_by_name(tmp_path):
    file = archive(tmp_path / "x.bin", pickle.dumps({"w": Evil()}, protocol=2))
    with pytest.raises(ValueError, match=r"x\.bin: the pickle names (posix|nt)\.system"):
        read_pickle(file)


def test_what_is_not_a_state_dict_is_an_error(tmp_path):
    for content, message in (
        ([1, 2], "holds a list, not a dict of tensors"),
        ({"epoch": 3}, "'epoch' is a int, not a tensor"),
        ({"model": OrderedDict()}, "'model' is a OrderedDict, not a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            read_pickle(archive(tmp_path / "x.bin", pickle.dumps(content)))
    with pytest.raises(ValueError, match=r"data\.pkl cannot be read"):
        read_pickle(archive(tmp_path / "x.bin", b"\x80\x02}"))


def test_a_storage_that_is_missing_short_or_compressed_is_an_error(tmp_path):
    good = tmp_path / "good.bin"
    entries = {"w": (np.dtype(np.float32), (4,))}
    write_pickle(good, entries, [("w", np.ones(4, np.float32))])
    content = zipfile.ZipFile(good).read("archive/data.pkl")
    for storages, message in (
        ([], r"the data of w \(storage 0\) is missing"),
        ([("0", bytes(12))], r"w of shape \[4\] ends at element 4 of its storage, which has 3"),
    ):
        with pytest.raises(ValueError, match=message):
            read_pickle(archive(tmp_path / "x.bin", content, storages))
    packed = archive(tmp_path / "x.bin", content, [("0", bytes(16))], zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="is compressed"):
        read_pickle(packed)


def test_a_truncated_archive_is_an_error(tmp_path, golden):
    data = io.BytesIO((golden("odd.bin")).read_bytes()).getvalue()
    (tmp_path / "x.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="it is truncated"):
        read_pickle(tmp_path / "x.bin")
