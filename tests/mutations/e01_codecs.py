"""E1: Encoded bytes come back bit by bit, or they are refused."""

from __future__ import annotations

from .changes import drop, never, replace

MUTATIONS = {
    ("test_a_byte_that_differs_leaves_its_block_as_it_is", "test_last_bytes_that_differ_are_not_taken_for_the_word"): {
        "all of a block has to repeat its first word": replace(
            "word_of", "len(source) - WORD_BYTES", "len(source) - 2 * WORD_BYTES"
        ),
    },
    "test_one_value_takes_a_word_for_each_block": {
        "the last bytes of a block repeat the word from its beginning": replace(
            "fill_with", "word[:rest_bytes]", "word[WORD_BYTES - rest_bytes:]"
        ),
        "all of the word is repeated": replace(
            "fill_with", "np.frombuffer(word, np.uint64)", "np.frombuffer(word, np.uint8)[0]"
        ),
    },
    "test_a_byte_that_is_no_bit_leaves_its_block_as_it_is": {
        "a byte that is no bit is not taken for one": replace("pack_bits", "values.max()", "values[0]"),
    },
    "test_masks_take_a_bit_for_each_byte": {
        "bits come back in their order": replace(
            "pack_bits", "np.packbits(values)", "np.packbits(values, bitorder='little')"
        ),
        "bits that fill no byte have room": replace("packed_bytes", "-(-num_bytes // 8)", "num_bytes // 8"),
        "no more bits come back than there were": drop("unpack_bits", "count=len(values)"),
    },
    "test_encode_then_decode_is_the_same": {
        "a block that is stored as it is says so": drop("encode_block", "header |= _STORED_AS_IS"),
        "byte planes are joined by the stride that split them": replace(
            "_decompress_planes", "setting.itemsize_bytes", "2"
        ),
    },
    "test_bits_of_another_length_are_refused": {
        "bits of another length are refused": replace(
            "bits:_decode",
            "len(payload) != packed_bytes(len(block))",
            "len(payload) < packed_bytes(len(block))",
        ),
    },
    "test_word_of_another_length_is_refused": {
        "a word of another length is refused": replace(
            "constant:_decode", "len(payload) != WORD_BYTES", "len(payload) < WORD_BYTES"
        ),
        "a block of nothing is refused": replace(
            "BlockDecoder._next_block", "0 < length <= len(block)", "length <= len(block)"
        ),
    },
    "test_block_that_is_stored_as_it_is_of_another_length_is_refused": {
        "a block that is stored as it is, of another length, is refused": never(
            "BlockDecoder._decode", "len(payload) != len(block)"
        ),
    },
    "test_block_longer_than_its_record_is_refused_before_it_is_there": {
        "a block longer than the rest of its record is refused": replace(
            "BlockDecoder._next_block", "0 < length <= len(block)", "0 < length"
        ),
    },
    "test_a_frame_of_another_length_is_refused": {
        "a frame that holds more is refused": replace("zstd:_fill", "length != len(out) or rest", "length != len(out)"),
        "a frame that holds less is refused": drop("zstd:_fill", "length != len(out)"),
    },
    "test_a_frame_that_asks_for_gigabytes_is_refused": {
        "a frame that asks for more memory than a block is refused": drop(
            "Workspace.decompressor", "max_window_size=2 * BLOCK_BYTES"
        ),
    },
    "test_decode_of_bytes_that_come_one_by_one_is_the_same": {
        "a block is decoded when all of it is there": replace(
            "BlockDecoder.feed", "start + length > len(encoded)", "start + length > len(encoded) + 1"
        ),
    },
}
