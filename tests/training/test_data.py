import torch

from training.data.digits import Digits
from training.data.stdlib import StdlibText, for_validation, source_files


def library(tmp_path, names):
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" * 40)
    return tmp_path


def test_the_text_is_the_same_whenever_it_is_read():
    one, two = StdlibText(max_bytes=2_000_000), StdlibText(max_bytes=2_000_000)
    assert one.identity() == two.identity()
    assert torch.equal(one.train.sample(7, 3, 5)["tokens"], two.train.sample(7, 3, 5)["tokens"])


def test_a_window_depends_on_epoch_and_seed_only_in_training():
    text = StdlibText(max_bytes=2_000_000)
    seen = {bytes(text.train.sample(9, e, s)["tokens"].tolist()) for e in range(3) for s in range(3)}
    assert len(seen) > 1
    assert len({bytes(text.val.sample(9, e, s)["tokens"].tolist()) for e in range(3) for s in range(3)}) == 1


def test_whole_files_are_held_out_and_other_files_dont_move_them(tmp_path):
    names = [f"pkg{i % 4}/mod{i}.py" for i in range(60)]
    root = library(tmp_path / "lib", names)
    held = {n for n in names if for_validation(n, 0.2)}
    assert 3 < len(held) < 25
    text = StdlibText(context=16, val_fraction=0.2, root=str(root))
    seen = bytes(text.val._text)
    assert all((f"# {n}\n".encode() in seen) == (n in held) for n in names)
    library(tmp_path / "lib", ["added/one.py", "test/skipped.py"])
    assert {n for n in names if for_validation(n, 0.2)} == held
    assert not any("skipped" in path.name for path in source_files(root))


def test_a_changed_file_changes_the_identity(tmp_path):
    root = library(tmp_path, [f"mod{i}.py" for i in range(40)])
    before = StdlibText(context=16, val_fraction=0.2, root=str(root)).identity()
    (root / "mod3.py").write_text("# changed\n" * 40)
    assert StdlibText(context=16, val_fraction=0.2, root=str(root)).identity() != before


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    whole = load_digits()
    data = Digits(val_fraction=0.2)
    assert (len(data.train), len(data.val)) == (1438, 359)
    rows = [s.sample(i, 0, 0) for s in (data.train, data.val) for i in range(len(s))]
    ours = sorted((*(r["inputs"] * 16).tolist(), r["targets"].item()) for r in rows)
    theirs = sorted((*x.tolist(), int(y)) for x, y in zip(whole.data, whole.target, strict=True))
    assert ours == theirs


def test_noise_is_added_to_training_samples_only():
    data = Digits(noise=0.5)
    assert not torch.equal(data.train.sample(3, 0, 0)["inputs"], data.train.sample(3, 1, 0)["inputs"])
    assert torch.equal(data.train.sample(3, 1, 0)["inputs"], data.train.sample(3, 1, 0)["inputs"])
    assert torch.equal(data.val.sample(3, 0, 0)["inputs"], data.val.sample(3, 1, 0)["inputs"])
