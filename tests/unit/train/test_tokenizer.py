import json
from pathlib import Path

import datasets
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from pumice.errors import UserError
from pumice.train import tokenizer as module
from pumice.train.recipe import TokenizerConfig
from pumice.train.tokenizer import build_tokenizer, check_vocabulary, encode, load_tokenizer, train_tokenizer

TEXTS = [f"def function_{number}(argument):\n    return argument + {number}\n" for number in range(50)]
TRAIN = datasets.Dataset.from_dict({"text": TEXTS})
TOKENIZER = train_tokenizer(TEXTS, vocab_size=300)


def bare(path: Path, vocabulary: list[str]) -> Path:
    """Write a tokenizer.json with nothing but a vocabulary."""
    Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="?")).save(str(path))
    return path


@given(st.text())
@example("  two  spaces , and a comma 's apostrophe n't \r\n\t")
@example("a<|endoftext|>b")
@example("naïve 東京 \U0001f980 e\u0301 \x00\ufeff")
def test_any_text_comes_back_as_it_was(text: str) -> None:
    (ids,) = encode(TOKENIZER, [text])
    assert TOKENIZER.decode(ids[:-1]) == text


def test_each_text_ends_with_the_end_of_text_token_and_holds_no_other() -> None:
    end = TOKENIZER.eos_token_id
    assert TOKENIZER.decode([end]) == "<|endoftext|>"
    assert TOKENIZER.bos_token_id == end
    encoded = encode(TOKENIZER, ["return", "", "a<|endoftext|>b"])
    assert [ids.count(end) for ids in encoded] == [1, 1, 1]
    assert all(ids[-1] == end for ids in encoded)
    assert encoded[1] == [end]


def test_long_texts_are_encoded_in_pieces_that_end_at_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 10)
    monkeypatch.setattr(module, "_PIECES_AT_ONCE", 2)
    text = "abc\nde\nfghij\n" + "x" * 25 + "\ny"
    assert list(module._pieces(text)) == ["abc\nde\n", "fghij\n", "x" * 10, "x" * 10, "xxxxx\ny"]
    encoded = encode(TOKENIZER, ["short", text, "", text + text])
    assert [TOKENIZER.decode(ids[:-1]) for ids in encoded] == ["short", text, "", text + text]


def test_training_is_deterministic_and_learns_from_the_texts_alone() -> None:
    again = train_tokenizer(TEXTS, vocab_size=300)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert len(TOKENIZER) == 300
    assert "Ġargument" in TOKENIZER.get_vocab()  # a space and the word: the commonest word of the texts


def test_a_corpus_may_be_too_small_for_the_vocabulary() -> None:
    small = train_tokenizer(["ab ab"], vocab_size=1000)
    assert 257 < len(small) < 265
    assert len(train_tokenizer([], vocab_size=1000)) == 257
    assert small.decode(encode(small, ["ü"])[0]) == "ü<|endoftext|>"


def test_the_tokenizer_is_kept_and_taken_up_again(tmp_path: Path) -> None:
    cache = tmp_path / "run" / "tokenizer"
    first = build_tokenizer(TokenizerConfig(vocab_size=280), TRAIN, vocab_size=512, cache=cache)
    assert len(first) == 280
    other = datasets.Dataset.from_dict({"text": ["something else"]})
    again = build_tokenizer(TokenizerConfig(vocab_size=280), other, vocab_size=512, cache=cache)
    for loaded in (again, AutoTokenizer.from_pretrained(cache)):
        assert loaded(TEXTS[0])["input_ids"] == first(TEXTS[0])["input_ids"]
        assert (loaded.bos_token, loaded.eos_token) == ("<|endoftext|>", "<|endoftext|>")


def test_a_run_killed_while_it_kept_its_tokenizer_leaves_no_half(tmp_path: Path) -> None:
    half = tmp_path / "tokenizer.partial"
    half.mkdir()
    (half / "tokenizer.json").write_text("{")
    built = build_tokenizer(TokenizerConfig(), TRAIN, vocab_size=300, cache=tmp_path / "tokenizer")
    assert len(built) == 300  # the model's size is the default
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokenizer"]


def test_a_tokenizer_by_path_is_kept_with_the_run(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "mine")
    config = TokenizerConfig(path=str(tmp_path / "mine"))
    loaded = build_tokenizer(config, TRAIN, vocab_size=512, cache=tmp_path / "run")
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert load_tokenizer(str(tmp_path / "run")).get_vocab() == TOKENIZER.get_vocab()


def test_a_bare_tokenizer_json_ends_texts_with_a_usual_token(tmp_path: Path) -> None:
    assert load_tokenizer(str(bare(tmp_path / "tokenizer.json", ["?", "a", "</s>"]))).eos_token_id == 2


def test_a_tokenizer_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.path '.*absent' does not exist: expected a folder, a tok"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"^the tokenizer in '.*' has no end-of-text token: name one as eos_token"):
        load_tokenizer(str(bare(tmp_path / "tokenizer.json", ["?", "a"])))
    (tmp_path / "not.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    for path in ("not.json", "empty"):
        with pytest.raises(UserError, match=rf"^no tokenizer can be loaded from '.*{path}': [^\n]+$"):
            load_tokenizer(str(tmp_path / path))


def test_a_vocabulary_must_fit_the_model(tmp_path: Path) -> None:
    check_vocabulary(TOKENIZER, 300)
    with pytest.raises(UserError, match=r"vocabulary of 300 exceeds the model's of 299: .*vocab_size to 300 or more"):
        check_vocabulary(TOKENIZER, 299)
    TOKENIZER.save_pretrained(tmp_path / "mine")
    config = TokenizerConfig(path=str(tmp_path / "mine"))
    with pytest.raises(UserError, match=r"vocabulary of 300 exceeds the model's of 256"):
        build_tokenizer(config, TRAIN, vocab_size=256, cache=tmp_path / "run")
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size is 513, more than the model's vocabulary of 512"):
        build_tokenizer(TokenizerConfig(vocab_size=513), TRAIN, vocab_size=512, cache=tmp_path / "run")
    with pytest.raises(UserError, match=r"needs at least 257 entries, got 256"):
        build_tokenizer(TokenizerConfig(vocab_size=256), TRAIN, vocab_size=512, cache=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ids_with_holes_count_up_to_the_largest(tmp_path: Path) -> None:
    path = bare(tmp_path / "tokenizer.json", ["?", "a", "</s>"])
    tree = json.loads(path.read_text())
    tree["model"]["vocab"]["far"] = 999
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match="vocabulary of 1000 exceeds the model's of 512"):
        check_vocabulary(load_tokenizer(path), 512)
