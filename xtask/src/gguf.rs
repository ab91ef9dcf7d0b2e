//! A reader of GGUF files, the container of llama.cpp's models. It knows the container and the
//! element types the demo model needs, not what the tensors and keys mean.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. All numbers are little
//! endian.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use serde_json::Value;

/// A parsed file; tensors point into its bytes.
pub(crate) struct Gguf<'a> {
    /// The key-value pairs. An f32 is kept as the shortest decimal number that rounds to it.
    pub(crate) metadata: BTreeMap<String, Value>,
    /// The tensors in the order of the file.
    pub(crate) tensors: Vec<Tensor<'a>>,
}

impl<'a> Gguf<'a> {
    /// Parse a whole file. Fails on truncated files, other versions and unknown element types.
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self> {
        let mut cursor = Cursor { bytes, at: 0 };
        ensure!(
            cursor.take(4)? == b"GGUF",
            "not a GGUF file: it does not begin with \"GGUF\""
        );
        let version = cursor.u32()?;
        ensure!(
            matches!(version, 2 | 3),
            "GGUF version {version} is not handled, only 2 and 3"
        );
        let (tensor_count, pair_count) = (cursor.u64()?, cursor.u64()?);

        let mut metadata = BTreeMap::new();
        for _ in 0..pair_count {
            let key = cursor.string()?;
            let kind = cursor.u32()?;
            let value = cursor
                .value(kind)
                .with_context(|| format!("in the value of {key}"))?;
            metadata.insert(key, value);
        }

        let mut places = Vec::new();
        for _ in 0..tensor_count {
            let name = cursor.string()?;
            let place = cursor
                .tensor_place()
                .with_context(|| format!("in tensor {name}"))?;
            places.push((name, place));
        }

        let alignment = metadata
            .get("general.alignment")
            .map_or(Some(32), Value::as_u64);
        let alignment = alignment
            .and_then(|a| usize::try_from(a).ok())
            .filter(|a| a.is_power_of_two())
            .context("general.alignment is not a power of two")?;
        let data = bytes
            .get(cursor.at.next_multiple_of(alignment)..)
            .unwrap_or_default();
        let tensors = places
            .into_iter()
            .map(|(name, (shape, element, offset))| Tensor::new(name, shape, element, offset, data))
            .collect::<Result<_>>()?;
        Ok(Self { metadata, tensors })
    }
}

/// One tensor: a matrix of `rows` × `columns` for everything but its name in the file.
pub(crate) struct Tensor<'a> {
    pub(crate) name: String,
    /// The dimensions, slowest first.
    pub(crate) shape: Vec<usize>,
    element: Element,
    data: &'a [u8],
}

impl<'a> Tensor<'a> {
    fn new(
        name: String,
        shape: Vec<usize>,
        element: Element,
        offset: u64,
        data: &'a [u8],
    ) -> Result<Self> {
        let columns = shape.last().copied().unwrap_or(1);
        let (values, bytes) = element.block();
        ensure!(
            columns > 0 && columns.is_multiple_of(values),
            "tensor {name}: rows of {columns} are not whole blocks of {values}"
        );
        let length = shape
            .iter()
            .try_fold(1_usize, |product, &n| product.checked_mul(n))
            .and_then(|elements| (elements / values).checked_mul(bytes));
        let data = usize::try_from(offset)
            .ok()
            .and_then(|start| Some(start..start.checked_add(length?)?))
            .and_then(|range| data.get(range))
            .with_context(|| format!("tensor {name} reaches past the end of the file"))?;
        Ok(Self {
            name,
            shape,
            element,
            data,
        })
    }

    /// Number of values in a row: the fastest dimension.
    pub(crate) fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all other dimensions.
    pub(crate) fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// Dequantize row `row` into `out`, which holds [`columns`](Self::columns) values.
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.columns(), "one row of {}", self.name);
        let (values, bytes) = self.element.block();
        let row_bytes = out.len() / values * bytes;
        let blocks = self.data[row * row_bytes..][..row_bytes].chunks_exact(bytes);
        for (block, out) in blocks.zip(out.chunks_exact_mut(values)) {
            self.element.dequantize(block, out);
        }
    }
}

/// How values are stored. `Q` types come in blocks of 32 with an f16 scale d.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Element {
    F32,
    F16,
    Bf16,
    /// d, 16 bytes of nibbles: d·(q − 8).
    Q4_0,
    /// d, f16 m, 16 bytes of nibbles: d·q + m.
    Q4_1,
    /// d, 32 signed bytes: d·q.
    Q8_0,
}

impl Element {
    fn from_id(id: u32) -> Result<Self> {
        Ok(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            30 => Self::Bf16,
            _ => {
                bail!("element type {id} is not handled, only F32, F16, BF16, Q4_0, Q4_1 and Q8_0")
            }
        })
    }

    /// Values and bytes of a block.
    fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q8_0 => (32, 34),
        }
    }

    fn dequantize(self, block: &[u8], out: &mut [f32]) {
        let half_at = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        match self {
            Self::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            Self::F16 => out[0] = half_at(0),
            Self::Bf16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            Self::Q4_0 => {
                let d = half_at(0);
                nibbles(&block[2..], out, |q| d * (f32::from(q) - 8.0));
            }
            Self::Q4_1 => {
                // Two roundings, as in the reference dequantizer: no fused multiply-add here.
                let (d, m) = (half_at(0), half_at(2));
                nibbles(&block[4..], out, |q| d * f32::from(q) + m);
            }
            Self::Q8_0 => {
                let d = half_at(0);
                for (&q, out) in block[2..].iter().zip(out) {
                    *out = d * f32::from(q.cast_signed());
                }
            }
        }
    }
}

/// The low nibbles are values 0 to 15 of a block, the high ones 16 to 31.
fn nibbles(packed: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for ((&byte, low), high) in packed.iter().zip(low).zip(high) {
        *low = value(byte & 15);
        *high = value(byte >> 4);
    }
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let taken = self.bytes[self.at..].get(..count).with_context(|| {
            format!(
                "the file ends in its header: {count} bytes wanted at byte {}",
                self.at
            )
        })?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N)?.try_into()?)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn string(&mut self) -> Result<String> {
        let length = usize::try_from(self.u64()?)?;
        Ok(String::from_utf8(self.take(length)?.to_vec())?)
    }

    fn value(&mut self, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.array()?).into(),
            1 => i8::from_le_bytes(self.array()?).into(),
            2 => u16::from_le_bytes(self.array()?).into(),
            3 => i16::from_le_bytes(self.array()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.array()?).into(),
            6 => f32::from_le_bytes(self.array()?)
                .to_string()
                .parse::<f64>()?
                .into(),
            7 => (self.array::<1>()? != [0]).into(),
            8 => self.string()?.into(),
            9 => {
                let (kind, length) = (self.u32()?, self.u64()?);
                ensure!(kind != 9, "arrays of arrays are not handled");
                (0..length)
                    .map(|_| self.value(kind))
                    .collect::<Result<Vec<_>>>()?
                    .into()
            }
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.array()?).into(),
            12 => f64::from_le_bytes(self.array()?).into(),
            _ => bail!("value type {kind} is not in the format"),
        })
    }

    /// Shape (slowest dimension first), element type and offset in the data.
    fn tensor_place(&mut self) -> Result<(Vec<usize>, Element, u64)> {
        let dimensions = self.u32()?;
        ensure!(
            dimensions <= 4,
            "{dimensions} dimensions are more than the format's 4"
        );
        let mut shape = (0..dimensions)
            .map(|_| Ok(usize::try_from(self.u64()?)?))
            .collect::<Result<Vec<_>>>()?;
        shape.reverse();
        Ok((shape, Element::from_id(self.u32()?)?, self.u64()?))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A GGUF file under construction, for tests.
    #[derive(Default)]
    pub(crate) struct Builder {
        pairs: Vec<Vec<u8>>,
        tensors: Vec<(Vec<u8>, Vec<u8>)>,
    }

    impl Builder {
        pub(crate) fn pair(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
            self.pairs
                .push([&string(key), &kind.to_le_bytes()[..], value].concat());
            self
        }

        /// `shape` is slowest first.
        pub(crate) fn tensor(mut self, name: &str, shape: &[u64], id: u32, data: &[u8]) -> Self {
            let mut info = string(name);
            info.extend((shape.len() as u32).to_le_bytes());
            shape
                .iter()
                .rev()
                .for_each(|n| info.extend(n.to_le_bytes()));
            info.extend(id.to_le_bytes());
            self.tensors.push((info, data.to_vec()));
            self
        }

        pub(crate) fn bytes(&self) -> Vec<u8> {
            let mut bytes = b"GGUF\x03\0\0\0".to_vec();
            bytes.extend((self.tensors.len() as u64).to_le_bytes());
            bytes.extend((self.pairs.len() as u64).to_le_bytes());
            bytes.extend(self.pairs.concat());
            let mut offset = 0_u64;
            for (info, data) in &self.tensors {
                bytes.extend(info);
                bytes.extend(offset.to_le_bytes());
                offset += data.len().next_multiple_of(32) as u64;
            }
            for (_, data) in &self.tensors {
                bytes.resize(bytes.len().next_multiple_of(32), 0);
                bytes.extend(data);
            }
            bytes
        }
    }

    pub(crate) fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    pub(crate) fn strings(texts: &[&str]) -> Vec<u8> {
        let mut bytes = 8_u32.to_le_bytes().to_vec();
        bytes.extend((texts.len() as u64).to_le_bytes());
        texts.iter().for_each(|text| bytes.extend(string(text)));
        bytes
    }

    /// Blocks of bytes (37·i + 11) mod 256 with d = 0.25 and m = −1.5; the values are those that
    /// the Python package `gguf` 0.19 dequantizes them to.
    #[test]
    fn blocks_dequantize_as_the_reference_does() {
        let cases = [
            (2, 18, false, [-0.75, 0.5, -2.0, -0.75, 0.0], -5.25),
            (3, 20, true, [2.25, -0.5, 1.0, 0.75, 1.5], 13.25),
            (8, 34, false, [21.25, 30.5, -32.0, -22.75, -12.0], -44.0),
        ];
        for (id, bytes, has_minimum, expected, sum) in cases {
            let mut block: Vec<u8> = (0..bytes)
                .map(|i: u32| ((37 * i + 11) & 255) as u8)
                .collect();
            block[..2].copy_from_slice(&f16::from_f32(0.25).to_le_bytes());
            if has_minimum {
                block[2..4].copy_from_slice(&f16::from_f32(-1.5).to_le_bytes());
            }
            let file = Builder::default().tensor("t", &[32], id, &block).bytes();
            let gguf = Gguf::parse(&file).unwrap();
            let mut row = [f32::NAN; 32];
            gguf.tensors[0].read_row(0, &mut row);
            assert_eq!(
                [0, 1, 15, 16, 31].map(|i| row[i]),
                expected,
                "element type {id}"
            );
            assert_eq!(row.iter().sum::<f32>(), sum, "element type {id}");
        }
    }

    #[test]
    fn header_values_and_rows_are_found() {
        let values: Vec<u8> = [1.5_f32, -2.0, 3.0, 4.25, 5.0, -6.0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let halves: Vec<u8> = [0.5_f32, -1.0]
            .iter()
            .flat_map(|&x| f16::from_f32(x).to_le_bytes())
            .collect();
        let brains: Vec<u8> = [8.0_f32, -3.0]
            .iter()
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect();
        let file = Builder::default()
            .pair("eps", 6, &1e-5_f32.to_le_bytes())
            .pair("words", 9, &strings(&["ein", "Wört"]))
            .pair("yes", 7, &[1])
            .pair("below", 5, &(-3_i32).to_le_bytes())
            .tensor("matrix", &[2, 3], 0, &values)
            .tensor("halves", &[2], 1, &halves)
            .tensor("brains", &[2, 1], 30, &brains)
            .bytes();
        let gguf = Gguf::parse(&file).unwrap();
        assert_eq!(gguf.metadata["eps"], 1e-5);
        assert_eq!(gguf.metadata["words"], serde_json::json!(["ein", "Wört"]));
        assert_eq!(gguf.metadata["yes"], true);
        assert_eq!(gguf.metadata["below"], -3);

        let row = |tensor: usize, row: usize| {
            let mut out = vec![0.0; gguf.tensors[tensor].columns()];
            gguf.tensors[tensor].read_row(row, &mut out);
            out
        };
        assert_eq!((gguf.tensors[0].rows(), gguf.tensors[0].columns()), (2, 3));
        assert_eq!(row(0, 1), [4.25, 5.0, -6.0]);
        assert_eq!(row(1, 0), [0.5, -1.0]);
        assert_eq!(row(2, 1), [-3.0]);
    }

    #[test]
    fn every_truncation_is_an_error() {
        let file = Builder::default()
            .pair("words", 9, &strings(&["a", "b"]))
            .tensor("t", &[2, 32], 8, &[7; 68])
            .bytes();
        assert!(Gguf::parse(&file).is_ok());
        for end in 0..file.len() {
            assert!(
                Gguf::parse(&file[..end]).is_err(),
                "the first {end} bytes parsed"
            );
        }
    }

    #[test]
    fn what_is_not_handled_is_named() {
        let message = |file: &[u8]| format!("{:#}", Gguf::parse(file).err().expect("an error"));
        let unknown = Builder::default()
            .tensor("odd", &[32], 99, &[0; 64])
            .bytes();
        assert!(message(&unknown).contains("odd") && message(&unknown).contains("99"));
        let partial = Builder::default()
            .tensor("short", &[31], 8, &[0; 64])
            .bytes();
        assert!(message(&partial).contains("short"));
        let huge = Builder::default()
            .tensor("huge", &[u64::MAX, 32], 8, &[0; 64])
            .bytes();
        assert!(message(&huge).contains("huge"));
        assert!(message(b"PK\x03\x04 and so on").contains("not a GGUF"));
    }
}
