"""TextData: what it refuses, and in which words."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from dlo_framework.errors import DloError
from dlo_tasks.llm.causal_lm import CausalLM
from dlo_tasks.llm.text_data import TextData
from support.texts import CHATML, WORDS, lines


def test_prediction_without_prompts_is_refused(make):
    for ask in (TextData.check_predict, lambda data: data.setup("predict")):
        with pytest.raises(
            DloError, match=r"predict_files must be set for prediction, got None; set data\.init_args\.predict_files"
        ):
            ask(make())
    make(predict_files="prompts.txt").check_predict()


def test_a_document_too_long_is_named_by_its_line(make):
    with pytest.raises(
        DloError,
        match=r"texts\.jsonl:2: document must have at most seq_len \+ 1 = 49 tokens, .*set seq_len to at least \d+",
    ):
        make(["short", " ".join(WORDS * 9)], long_samples="error").setup("fit")


def test_data_without_anything_to_learn_are_refused(make, tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML)
    file = lines(tmp_path / "chats.jsonl", {"messages": [{"role": "user", "content": "the loss"}]})
    data = make(train_files=str(file), chat_template=str(tmp_path / "chat.jinja"))
    with pytest.raises(
        DloError,
        match=r"documents must have at least one target, got none in the 1 of .*chats\.jsonl: .* 1 pieces have no",
    ):
        data.setup("fit")


def test_a_broken_line_is_named_with_its_file(make, tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text('{"text": "fine"}\n{"text": "bro\n')
    data = make(train_files=str(file))
    data.check()  # reads the first record only
    with pytest.raises(DloError, match=r"broken\.jsonl:2: JSON is invalid"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len and corpus_bytes must be at least 1"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1"),
        ({"columns": {"body": "text"}}, "columns must rename messages, .*, got body"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(DloError, match=message):
        TextData(**options)


def test_the_check_finds_what_is_missing_before_the_run(make, tmp_path):
    with pytest.raises(DloError, match="val_files must match a file"):
        make(val_files=str(tmp_path / "*.parquet")).check()
    file = lines(tmp_path / "other.jsonl", {"test": "a"})
    with pytest.raises(DloError, match=r"other\.jsonl:1: record must have .* got 'test'; did you mean 'text'"):
        make(train_files=str(file)).check()


def test_a_model_whose_tokenizer_has_no_chat_template_is_refused_before_the_run(make, tmp_path):
    words = make()
    words.setup("fit")
    words.tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=400, **sizes)).save_pretrained(tmp_path / "model")
    chat = {"messages": [{"role": "user", "content": "the loss"}, {"role": "assistant", "content": "is 3"}]}
    file = lines(tmp_path / "chats.jsonl", chat)
    task = CausalLM(model=str(tmp_path / "model"))
    with pytest.raises(DloError, match=r"chats\.jsonl:1: tokenizer must have a chat template for messages, got none"):
        task.check(make(train_files=str(file)))
    (tmp_path / "chat.jinja").write_text(CHATML)
    task.check(make(train_files=str(file), chat_template=str(tmp_path / "chat.jinja")))
