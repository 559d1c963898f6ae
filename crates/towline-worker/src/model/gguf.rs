//! GGUF files, read with suspicion.
//!
//! Candle parses the format and its quantised types. Before it does, `scan` walks the header without keeping
//! anything: counts, lengths and nesting are checked against the file's size and against bounds no model exceeds, so
//! that parsing allocates a small multiple of the file at most and cannot meet the values that make it panic (an
//! alignment of 0). Layout after the specification, <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>,
//! versions 2 and 3.

use std::collections::HashMap;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};

use super::LoadError;

/// Most entries of metadata: models have some thirty.
const ENTRIES_MAX: u64 = 1 << 16;
/// Most tensors: models have nine a layer.
const TENSORS_MAX: u64 = 1 << 16;
/// Most array elements in the whole header: a vocabulary of a million has three arrays. Candle keeps 32 bytes each.
const ELEMENTS_MAX: u64 = 1 << 23;

/// An open model file.
pub(super) struct File {
    path: PathBuf,
    reader: BufReader<std::fs::File>,
    content: Content,
}

impl File {
    /// Opens and parses the header of `path`.
    pub(super) fn open(path: &Path) -> Result<Self, LoadError> {
        let opened = |source| LoadError::Open { path: path.into(), source };
        let file = std::fs::File::open(path).map_err(opened)?;
        let metadata = file.metadata().map_err(opened)?;
        if !metadata.is_file() {
            return Err(LoadError::NotGguf { path: path.into(), what: "it is not a regular file".into() });
        }
        let mut reader = BufReader::with_capacity(1 << 20, file);
        Scan { reader: &mut reader, path, at: 0, len: metadata.len(), elements: 0 }.header()?;
        reader.rewind().map_err(opened)?;
        let content = Content::read(&mut reader)
            .map_err(|error| LoadError::Damaged { path: path.into(), what: error.to_string() })?;
        Ok(Self { path: path.into(), reader, content })
    }

    /// Metadata by key.
    pub(super) fn metadata(&self) -> &HashMap<String, Value> {
        &self.content.metadata
    }

    /// Names of all tensors.
    pub(super) fn tensor_names(&self) -> impl Iterator<Item = &String> {
        self.content.tensor_infos.keys()
    }

    /// Whether the file has a tensor of this name.
    pub(super) fn has_tensor(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// The values of a tensor of the given shape (outputs × inputs, or one dimension), as f32.
    pub(super) fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let info = self
            .content
            .tensor_infos
            .get(name)
            .ok_or_else(|| LoadError::MissingTensor { name: name.into() })?;
        if info.shape.dims() != shape {
            let (expected, found) = (shape.to_vec(), info.shape.dims().to_vec());
            return Err(LoadError::TensorShape { name: name.into(), expected, found });
        }
        let wrong = |what: String| LoadError::Tensor { name: name.into(), what };
        let block = info.ggml_dtype.block_size();
        if !shape.last().is_some_and(|inputs| inputs.is_multiple_of(block)) {
            return Err(wrong(format!(
                "rows of {shape:?} are no multiple of {:?}'s blocks of {block}",
                info.ggml_dtype
            )));
        }
        let read = self.content.tensor(&mut self.reader, name, &Device::Cpu);
        let tensor = read.map_err(|error| LoadError::Damaged {
            path: self.path.clone(),
            what: format!("tensor `{name}`: {error}"),
        })?;
        let values =
            tensor.dequantize(&Device::Cpu).and_then(|values| values.flatten_all()?.to_vec1::<f32>());
        values.map_err(|error| wrong(error.to_string()))
    }
}

/// Walks a header, checking every length before it is believed.
struct Scan<'a, R> {
    reader: &'a mut BufReader<R>,
    path: &'a Path,
    at: u64,
    len: u64,
    elements: u64,
}

impl<R: Read + Seek> Scan<'_, R> {
    fn header(&mut self) -> Result<(), LoadError> {
        let magic = self.bytes::<4>("the magic number")?;
        if &magic != b"GGUF" {
            return Err(self.not_gguf(format!("it starts with {magic:02x?}, not with `GGUF`")));
        }
        let version = self.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(self.not_gguf(format!("its version is {version}; 2 and 3 are read")));
        }
        let tensors = self.u64("the tensor count")?;
        let entries = self.u64("the metadata count")?;
        if tensors > TENSORS_MAX || entries > ENTRIES_MAX {
            return Err(self.damaged(format!("it claims {tensors} tensors and {entries} metadata entries")));
        }
        for _ in 0..entries {
            let key = self.string("a metadata key")?;
            let kind = self.u32("a value's type")?;
            if key == "general.alignment" {
                self.alignment(kind)?;
            } else {
                self.value(kind, &key)?;
            }
        }
        Ok(())
    }

    /// Candle divides by the alignment, whatever it is.
    fn alignment(&mut self, kind: u32) -> Result<(), LoadError> {
        if kind != 4 {
            return Err(self.damaged(format!("`general.alignment` has type {kind}, not u32 (4)")));
        }
        let alignment = self.u32("general.alignment")?;
        let sound = alignment.is_power_of_two() && alignment <= 1 << 20;
        if sound {
            Ok(())
        } else {
            Err(self.damaged(format!("its alignment is {alignment}, not a power of two up to 1 MiB")))
        }
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<(), LoadError> {
        match (kind, size(kind)) {
            (8, _) => self.skip_string(key),
            (9, _) => self.array(key),
            (_, Some(size)) => self.skip(size, key),
            _ => Err(self.damaged(format!("`{key}` has the unknown type {kind}"))),
        }
    }

    fn array(&mut self, key: &str) -> Result<(), LoadError> {
        let kind = self.u32(key)?;
        let count = self.u64(key)?;
        self.elements = self.elements.saturating_add(count);
        if self.elements > ELEMENTS_MAX {
            return Err(self.damaged(format!("`{key}` claims {count} elements")));
        }
        match (kind, size(kind)) {
            (8, _) => (0..count).try_for_each(|_| self.skip_string(key)),
            (_, Some(size)) => self.skip(count * size, key),
            _ => Err(self.damaged(format!("`{key}` is an array of the unsupported type {kind}"))),
        }
    }

    fn skip_string(&mut self, what: &str) -> Result<(), LoadError> {
        let len = self.u64(what)?;
        self.skip(len, what)
    }

    fn string(&mut self, what: &str) -> Result<String, LoadError> {
        let len = self.u64(what)?;
        if len > 65_535 {
            return Err(self.damaged(format!("{what} of {len} bytes at offset {}", self.at)));
        }
        self.room(len, what)?;
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        self.read(&mut bytes, what)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn skip(&mut self, len: u64, what: &str) -> Result<(), LoadError> {
        self.room(len, what)?;
        self.at += len;
        let moved = self.reader.seek_relative(i64::try_from(len).unwrap_or(i64::MAX));
        moved.map_err(|source| LoadError::Open { path: self.path.into(), source })
    }

    fn room(&self, len: u64, what: &str) -> Result<(), LoadError> {
        let left = self.len.saturating_sub(self.at);
        if len <= left {
            Ok(())
        } else {
            Err(self.damaged(format!("{what} at offset {} needs {len} bytes, {left} are left", self.at)))
        }
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], LoadError> {
        let mut bytes = [0; N];
        self.room(N as u64, what)?;
        self.read(&mut bytes, what)?;
        Ok(bytes)
    }

    fn read(&mut self, into: &mut [u8], what: &str) -> Result<(), LoadError> {
        self.at += into.len() as u64;
        self.reader.read_exact(into).map_err(|error| self.damaged(format!("{what}: {error}")))
    }

    fn u32(&mut self, what: &str) -> Result<u32, LoadError> {
        self.bytes(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, LoadError> {
        self.bytes(what).map(u64::from_le_bytes)
    }

    fn damaged(&self, what: String) -> LoadError {
        LoadError::Damaged { path: self.path.into(), what }
    }

    fn not_gguf(&self, what: String) -> LoadError {
        LoadError::NotGguf { path: self.path.into(), what }
    }
}

/// Bytes of a value of a type of fixed size, by GGUF's type numbers.
fn size(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
