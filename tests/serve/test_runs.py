"""The folder of runs is served as it is, and nothing outside of it."""

import json

import pytest
from made_runs import make_run, record

pytest.importorskip("starlette", reason="needs the extra `serve`")
testclient = pytest.importorskip("starlette.testclient", reason="needs the package httpx")

from arbcli.serve import runs as served  # noqa: E402
from arbcli.serve.app import build_app  # noqa: E402
from arbcli.training import record as records  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    for name, lr in (("001-a", 0.5), ("002-b", 0.25)):
        records = [record(10, 3.0), record(20, 2.0, 2.5), record(30, 1.5)]
        make_run(tmp_path / "runs" / name, records, lr=lr)
    return tmp_path / "runs"


def client(folder, **options):
    return testclient.TestClient(build_app(None, watch=folder), **options)


def steps(answer) -> list[int]:
    assert answer.status_code == 200
    return [record["step"] for record in answer.json()["records"]]


def test_runs_have_results_and_the_settings_that_differ(folder):
    answer = client(folder).get("/runs").json()
    assert answer["damaged"] == {}
    first, second = answer["runs"]
    assert (first["name"], first["settings"]) == ("001-a", {"lr": 0.5})
    assert (second["name"], second["settings"]) == ("002-b", {"lr": 0.25})
    assert (first["step"], first["steps"], first["loss"], first["val_loss"]) == (30, 100, 1.5, 2.5)
    assert 0 <= first["age"] < 60
    assert str(folder) not in json.dumps(answer)


def test_records_are_those_after_an_offset(folder, monkeypatch):
    get, path = client(folder).get, folder / "001-a" / "metrics.jsonl"
    whole = get("/runs/001-a/metrics")
    assert steps(whole) == [10, 20, 30]
    end = whole.json()["next"]
    assert end == path.stat().st_size
    line = json.dumps(record(40, 1.25)).encode() + b"\n"
    with path.open("ab") as file:
        file.write(line[:20])  # is being written
    assert get(f"/runs/001-a/metrics?from={end}").json() == {"records": [], "next": end}
    with path.open("ab") as file:
        file.write(line[20:] + b"cut\n")
    after = get(f"/runs/001-a/metrics?from={end}")
    assert (steps(after), after.json()["next"]) == ([40], path.stat().st_size)
    monkeypatch.setattr(served, "ANSWER_BYTES", end - 1)
    assert get("/runs/001-a/metrics").json() == whole.json()
    for offset in ("x", "-1", "", 10**12):
        assert get(f"/runs/001-a/metrics?from={offset}").status_code == 400
    assert steps(get(f"/runs/001-a/metrics?from={10**11}")) == []


def test_poll_parses_new_records_alone(folder, monkeypatch):
    get, parsed = client(folder).get, []
    parse = records._parsed
    monkeypatch.setattr(records, "_parsed", lambda line: parsed.append(line) or parse(line))
    first = get("/runs").json()["runs"][0]
    assert len(parsed) == 6
    with (folder / "001-a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(40, 1.25, 2.0)) + "\n")
    second = get("/runs").json()["runs"][0]
    assert len(parsed) == 6 + 2  # the last line that was read, and the new one
    changed = {"step": 40, "loss": 1.25, "val_loss": 2.0, "best_val_loss": 2.0, "best_step": 40}
    changed |= {"peak_bytes": 41 << 20, "seconds": 4.0, "bytes_per_second": 625.0}
    assert second == first | changed | {"age": second["age"]}
    get(f"/runs/001-a/metrics?from={len(b''.join(parsed[:3]))}")
    assert len(parsed) == 8 + 1


def test_new_records_are_seen_and_replaced_ones_are_another_branch(folder):
    get = client(folder).get
    before = get("/runs").json()["runs"][0]
    metrics = folder / "001-a" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(json.dumps(record(40, 1.25)) + "\n")
    added = get("/runs").json()["runs"][0]
    assert (added["step"], added["branch"]) == (40, before["branch"])
    branches = {added["branch"]}
    for lines in ([record(10, 3.0)], [record(10, 2.0)], [record(10, 2.0), record(20, 1.0)]):
        other = folder / "other"
        other.write_text("".join(json.dumps(line) + "\n" for line in lines))
        other.replace(metrics)
        replaced = get("/runs").json()["runs"][0]
        assert (replaced["step"], replaced["loss"]) == (lines[-1]["step"], lines[-1]["loss"])
        branches.add(replaced["branch"])
    assert len(branches) == 3  # the last lines continue those before


def test_file_that_is_too_large_for_records_is_not_read(folder, monkeypatch):
    path = folder / "002-b" / "metrics.jsonl"
    with path.open("ab") as file:
        file.truncate(10**12)  # without using space
    monkeypatch.setattr(records, "_parsed", lambda line: pytest.fail("read"))
    (folder / "001-a" / "config.json").unlink()
    wanted = f"`{path}` has 1,000,000,000,000 bytes, and records have at most 1,073,741,824"
    get = client(folder).get
    assert get("/runs").json() == {"runs": [], "damaged": {"002-b": wanted}}
    assert get("/runs/002-b/metrics").json() == {"error": {"message": wanted}}


def test_settings_that_are_not_unicode_or_finite_are_served(folder):
    path = folder / "001-a" / "config.json"
    facts = json.loads(path.read_text())
    facts["config"] |= {"data": ["\udcff"], "lr": 0.125}
    path.write_text(json.dumps(facts).replace("0.125", "1e999"))
    settings = client(folder).get("/runs").json()["runs"][0]["settings"]
    assert settings == {"data": ["\udcff"], "lr": None}


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2fsecret", "%2fetc", "link", "linked", "nothing", "001-a%00", ""]
)
def test_no_name_leads_out_of_the_folder(name, folder):
    secret = make_run(folder.parent / "secret", [record(10, 3.0)])
    (folder / "link").symlink_to(secret)
    linked = make_run(folder / "linked", [])
    (linked / "metrics.jsonl").unlink()
    (linked / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    get = client(folder).get
    assert get(f"/runs/{name}/metrics").status_code == 404
    assert [run["name"] for run in get("/runs").json()["runs"]] == ["001-a", "002-b"]


def test_damage_is_named_with_its_reason(folder):
    (folder / "001-a" / "config.json").write_text("{cut off")
    answer = client(folder).get("/runs").json()
    assert [run["name"] for run in answer["runs"]] == ["002-b"]
    assert "is not JSON" in answer["damaged"]["001-a"]
    answer = client(folder.parent / "nowhere").get("/runs")
    assert answer.status_code == 500
    assert "cannot read" in answer.json()["error"]["message"]


def test_page_permits_its_script_and_no_other_host(folder):
    answer = client(None).get("/")
    policy = dict(part.strip().split(" ", 1) for part in
                  answer.headers["content-security-policy"].split(";"))  # fmt: skip
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert len(policy["script-src"].split()) == answer.text.count("<script") == 1
    assert len(policy["style-src"].split()) == answer.text.count("<style") == 1
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert client(None).get("/runs").status_code == 404
