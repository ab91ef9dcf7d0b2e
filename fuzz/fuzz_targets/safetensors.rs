#![no_main]

libfuzzer_sys::fuzz_target!(init: tileinfer_fuzz::quiet(), |bytes: &[u8]| tileinfer_fuzz::safetensors(bytes));
