"""Texts that are hardly meant are named before a run starts."""

from arbcli.data import open_texts
from arbcli.media.spans import PictureHeader
from arbcli.train.text_warnings import text_warnings

PROSE = b"Ternary weights learn to read, a byte at a time, and then another one. " * 200


def warnings(folder, **contents: bytes) -> list[str]:
    for name, content in contents.items():
        (folder / f"{name}.txt").write_bytes(content)
    return text_warnings(open_texts([str(folder / "data*")], [str(folder / "val*")], **WHERE))


WHERE = {"seed": 0, "context": 8}


def test_nothing_is_said_of_two_parts_of_a_text(tmp_path):
    assert warnings(tmp_path, data=PROSE, val=PROSE[1000:5000]) == []


def test_files_with_bytes_of_0_are_named(tmp_path):
    (one,) = warnings(tmp_path, data1=PROSE, data2=PROSE[:99] + bytes(3), val=PROSE)
    assert "data2.txt` have bytes of 0" in one
    (one,) = warnings(tmp_path, data2=PROSE[:500], data3=bytes(1) + PROSE, val=PROSE)
    assert "data3.txt` have bytes of 0" in one
    (one,) = warnings(tmp_path, data1=bytes(1) + PROSE, val=PROSE)
    assert "data1.txt` and 1 more have bytes of 0" in one


def test_held_out_file_with_bytes_of_0_is_named_too(tmp_path):
    (one,) = warnings(tmp_path, data=PROSE, val=PROSE + bytes(1), val2=bytes(1) + PROSE)
    assert "val2.txt` have bytes of 0" in one  # of the other one only the beginning is read


def test_nothing_is_said_of_bytes_of_0_in_sounds_and_pictures(tmp_path):
    picture = b"a page\n" + PictureHeader("grey", 3, 1).encode() + bytes(3) + b"\n"
    assert warnings(tmp_path, data=picture + PROSE, val=PROSE) == []
    (one,) = warnings(tmp_path, data=b"\xffpicture" + picture[20:] + PROSE, val=PROSE)
    assert "data.txt` have bytes of 0" in one


def test_held_out_text_of_another_kind_is_told(tmp_path):
    noise = bytes(range(1, 256)) * 50
    (one,) = warnings(tmp_path, data=PROSE, val=noise)
    assert "its order-0 entropy is 5.54 nats, and not 2." in one
    assert "`--val`" in one
