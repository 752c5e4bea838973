"""Both trace formats, told by content; what is wrong is said with file and line."""

from pathlib import Path

import pytest

from loadtest.workloads.traces import TraceError, TraceRequest, read_trace

SAMPLES = Path(__file__).parents[3] / "loadtest" / "traces"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, newline="")
    return path


def test_mooncake_lines_in_the_order_of_arrival(tmp_path):
    path = written(
        tmp_path,
        '{"timestamp": 9000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n\n'
        '{"timestamp": 3000, "input_length": 10, "output_length": 0, "hash_ids": [7]}\n',
    )
    assert read_trace(path) == [TraceRequest(0.0, 10, 0, (7,)), TraceRequest(6.0, 600, 5, (7, 8))]
    assert len(read_trace(path, limit=1)) == 1


def test_azure_rows_with_seven_digits_and_a_byte_order_mark(tmp_path):
    rows = "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
    found = read_trace(written(tmp_path, "\ufeff" + AZURE + rows))
    assert [(r.input_tokens, r.output_tokens, r.block_hashes) for r in found] == [
        (374, 44, ()),
        (396, 109, ()),
    ]
    assert [r.arrival_s for r in found] == pytest.approx([0.0, 4.314579])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", ":1: neither"),
        ("", ":1: neither"),
        (AZURE, "contains no requests"),
        (AZURE + "2023-11-16 18:15:46,374\r\n", ":2:"),
        (AZURE + "yesterday,1,1\r\n", ":2:"),
        (AZURE + "2023-11-16 18:15:46,0,1\r\n", ":2: 0 input"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}\n{"timestamp"\n', ":2:"),
        ('{"timestamp": 1}\n', ":1: .*input_length"),
        ('{"timestamp": 1, "input_length": 1, "output_length": -1}\n', ":1: 1 input and -1"),
    ],
)
def test_what_is_no_trace_is_named_with_its_line(tmp_path, text, said):
    with pytest.raises(TraceError, match=said):
        read_trace(written(tmp_path, text))


def test_binary_is_no_trace(tmp_path):
    (tmp_path / "trace").write_bytes(b"{\xff\xfe")
    with pytest.raises(TraceError):
        read_trace(tmp_path / "trace")


def test_the_samples_that_ship_are_whole_and_licensed():
    conversation = read_trace(SAMPLES / "mooncake_conversation.jsonl")
    azure = read_trace(SAMPLES / "azure_conv_2023.csv")
    assert len(conversation) == len(azure) == 300
    # As published: the last hash stands for a partial block.
    assert all(-(-r.input_tokens // 512) == len(r.block_hashes) for r in conversation)
    assert all(r.block_hashes == () for r in azure)
    assert "Apache License" in (SAMPLES / "LICENSE-mooncake").read_text()
    assert "Attribution 4.0" in (SAMPLES / "LICENSE-azure").read_text()
