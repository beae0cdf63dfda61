//! A checkpoint: one config and one namespace of tensors, whatever the container.
//!
//! Names and config are those of Hugging Face. For GGUF files the dialect of the architecture translates both, and
//! says per tensor where rows lie and what was added to the values.

use super::detect::{self, Content, Found};
use super::folder::Folder;
use super::gguf::Gguf;
use super::scheme::{Piece, Settings, Stored};
use super::source::{Access, Source};
use super::{TensorInfo, dialect, index, native, safetensors};
use crate::bail;
use crate::error::{Context, Error, Kind, Result};
use crate::tensor::{DType, RowMap, TensorView};
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// An open checkpoint. Opening reads headers only; tensor bytes are read when somebody looks at them.
pub struct Checkpoint {
    config: Value,
    generation_config: Option<Value>,
    folder: Option<Folder>,
    /// What the config says of quantisation, or why this build cannot read it.
    settings: Result<Settings>,
    files: Vec<Arc<Source>>,
    gguf: Option<Gguf>,
    tensors: Vec<Located>,
    by_name: HashMap<String, usize>,
}

/// A tensor, its file, and how its values are to be read.
pub(super) struct Located {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub file: usize,
    pub range: Range<usize>,
    pub row_map: RowMap,
    pub offset: f32,
}

/// What a checkpoint consists of, for people and for planning.
#[derive(Clone, Debug)]
pub struct Description {
    /// `safetensors` or `GGUF v3`.
    pub format: String,
    /// `model_type` of the config.
    pub model_type: Option<String>,
    /// Files with tensors: path and size.
    pub files: Vec<(String, u64)>,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of all tensors as stored.
    pub tensor_bytes: u64,
    /// Bytes by element type, largest first.
    pub by_dtype: Vec<(DType, u64)>,
}

/// Largest config that is read, far above any published one.
const MAX_CONFIG: u64 = 64 << 20;
/// Largest other JSON file; vocabularies reach tens of megabytes.
const MAX_JSON: u64 = 512 << 20;

impl Checkpoint {
    /// Opens a folder or a file: a Hugging Face folder, a `.gguf` file or a folder with one, a safetensors file beside
    /// its `config.json`. Files are mapped.
    pub fn open(path: &Path) -> Result<Checkpoint> {
        Self::open_with(path, Access::Map)
    }

    /// Opens with a choice of how bytes are reached.
    pub fn open_with(path: &Path, access: Access) -> Result<Checkpoint> {
        match detect::identify(path)? {
            Found::Gguf(path) => Self::open_gguf(&path, access),
            Found::Folder(folder) => Self::open_folder(Folder::Path(folder), access),
            Found::Safetensors(file) => Self::open_safetensors(&file, access),
        }
    }

    /// Opens a folder for its config alone, weights or not: for synthetic weights and planning.
    pub fn open_config(path: &Path) -> Result<Checkpoint> {
        match detect::identify(path)? {
            Found::Folder(folder) => Self::assemble(Folder::Path(folder), Vec::new(), Vec::new()),
            _ => Self::open(path),
        }
    }

    /// A folder that a host put together: one with `config.json`, or with one GGUF file or all parts of one. With
    /// `config_only`, the former needs no weights.
    pub fn open_parts(parts: Arc<[(String, Arc<Source>)]>, config_only: bool) -> Result<Checkpoint> {
        let folder = Folder::Parts(Arc::clone(&parts));
        if folder.exists("config.json")? || folder.exists(native::PARAMS)? {
            return if config_only { Self::assemble(folder, Vec::new(), Vec::new()) } else { Self::open_folder(folder, Access::Map) };
        }
        let gguf =
            |name: &str| name.to_ascii_lowercase().ends_with(".gguf") && detect::split_part(name).is_none_or(|(_, part, _)| part == 1);
        let mut found = parts.iter().filter(|(name, _)| gguf(name));
        match (found.next(), found.next()) {
            (Some((name, source)), None) => Self::open_gguf_parts(Arc::clone(source), name, &|part| folder.open(part, Access::Map), None),
            (Some((a, _)), Some((b, _))) => {
                bail!(InvalidArgument, "the source has more than one GGUF file ({a}, {b} ...); add only one")
            }
            (None, _) => {
                let names: Vec<&str> = parts.iter().take(8).map(|(name, _)| name.as_str()).collect();
                bail!(NotAModel, "the source has {} parts {names:?}, and neither config.json nor a .gguf file is among them", parts.len())
            }
        }
    }

    /// A GGUF file in memory; `label` stands in errors where a path would.
    pub fn from_bytes(label: &str, bytes: Vec<u8>) -> Result<Checkpoint> {
        Self::from_source(Arc::new(Source::from_bytes(label, bytes)))
    }

    /// A GGUF file without a folder around it: one that is not split.
    pub fn from_source(source: Arc<Source>) -> Result<Checkpoint> {
        let (bytes, label) = (source.bytes(), source.label());
        match detect::content(&bytes[..bytes.len().min(512)], bytes.len() as u64) {
            Content::Gguf => {}
            Content::Safetensors => bail!(
                Unsupported,
                "{label}: safetensors bytes come without their config.json; open the folder by its path, or add all its files to a folder source"
            ),
            Content::Other(what) => return Err(detect::not_a_model(label, what)),
        }
        let gguf = Gguf::read(source)?;
        let parts = gguf.u64("split.count")?.unwrap_or(1);
        if parts > 1 {
            bail!(
                Unsupported,
                "{}: is one of {parts} parts, which find each other by name; open the first by its path, or add all to a folder source",
                gguf.source().label()
            );
        }
        Self::from_gguf(vec![gguf], None)
    }

    /// The config, an object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `generation_config.json`, or what GGUF metadata says of the same.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// A tensor by its Hugging Face name; GGUF tensors that no dialect renames keep the file's name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let t = &self.tensors[*self.by_name.get(name)?];
        Some(TensorView {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            data: &self.files[t.file].bytes()[t.range.clone()],
            row_map: t.row_map,
            offset: t.offset,
        })
    }

    /// The file that holds a tensor, and where its bytes lie in it: for rows that stay where they are.
    pub fn locate(&self, name: &str) -> Option<(Arc<Source>, Range<usize>)> {
        let t = &self.tensors[*self.by_name.get(name)?];
        Some((Arc::clone(&self.files[t.file]), t.range.clone()))
    }

    /// A tensor by its Hugging Face name, in whatever form the files hold it: plain, or as codes with scales beside them.
    /// `None` where they hold it in no form.
    pub fn stored(&self, name: &str) -> Result<Option<Stored>> {
        Stored::find(self, self.settings()?, name)
    }

    /// Fails where the checkpoint is quantised in a way this build does not read.
    pub fn check_quantisation(&self) -> Result<()> {
        self.settings().map(|_| ())
    }

    fn settings(&self) -> Result<&Settings> {
        self.settings.as_ref().map_err(Clone::clone)
    }

    /// Whether a module's weight is there, in whatever form.
    pub(super) fn has_module(&self, module: &str) -> bool {
        ["weight", "weight_packed"].iter().any(|leaf| self.by_name.contains_key(&format!("{module}.{leaf}")))
    }

    /// One tensor of the files, with a share of its file.
    pub(super) fn piece(&self, name: &str) -> Option<Piece> {
        let t = &self.tensors[*self.by_name.get(name)?];
        Some(Piece {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            row_map: t.row_map,
            offset: t.offset,
            file: Arc::clone(&self.files[t.file]),
            range: t.range.clone(),
        })
    }

    /// Names of all tensors, in file order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|t| t.name.as_str())
    }

    /// The GGUF file, for its tokenizer and template. Of a split file, the first part.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.gguf.as_ref()
    }

    /// The folder of the checkpoint, where `tokenizer.json` and others lie. None for bytes in memory.
    pub fn folder(&self) -> Option<&Path> {
        match &self.folder {
            Some(Folder::Path(folder)) => Some(folder),
            _ => None,
        }
    }

    /// The files beside the weights.
    pub fn beside(&self) -> Option<&Folder> {
        self.folder.as_ref()
    }

    /// Bytes of files that were read into memory and stay there; mapped files and a host's own buffers do not count.
    pub fn held_bytes(&self) -> u64 {
        let mut parts: &[(String, Arc<Source>)] = &[];
        if let Some(Folder::Parts(all)) = &self.folder {
            parts = all;
        }
        let own = if parts.is_empty() { &self.files[..] } else { &[] };
        own.iter().chain(parts.iter().map(|(_, source)| source)).map(|source| source.held()).sum()
    }

    /// Another JSON file of the folder; `None` where it (or the folder) does not exist.
    pub fn read_json(&self, file: &str) -> Result<Option<Value>> {
        if !index::stays_inside(file) {
            bail!(InvalidArgument, "{file:?} is not a file name inside the checkpoint's folder");
        }
        match &self.folder {
            Some(folder) => folder.json(file, MAX_JSON),
            None => Ok(None),
        }
    }

    /// Gives a tensor's pages back after they were copied elsewhere. Reading it again works. No-op when not mapped.
    pub fn release(&self, name: &str) {
        self.release_part(name, 0..1, 1);
    }

    /// As [`Checkpoint::release`], a part of `count` equal ones: as they are read, or so that threads do it together, since it takes the system
    /// about as long as giving the pages did.
    pub fn release_part(&self, name: &str, part: Range<usize>, count: usize) {
        // The large piece of a quantised tensor has a name of its own.
        let packed = || name.strip_suffix("weight").and_then(|stem| self.by_name.get(&format!("{stem}weight_packed")));
        let found = self.by_name.get(name).or_else(packed).or_else(|| self.by_name.get(&format!("{name}_blocks")));
        if let Some(&i) = found {
            let t = &self.tensors[i];
            let at = |index: usize| t.range.start + (t.range.len() as u128 * index as u128 / count.max(1) as u128) as usize;
            self.files[t.file].release(at(part.start)..at(part.end));
        }
    }

    /// Format, files and sizes.
    pub fn describe(&self) -> Description {
        let mut by_dtype: Vec<(DType, u64)> = Vec::new();
        for t in &self.tensors {
            let bytes = t.range.len() as u64;
            match by_dtype.iter_mut().find(|(dtype, _)| *dtype == t.dtype) {
                Some((_, sum)) => *sum += bytes,
                None => by_dtype.push((t.dtype, bytes)),
            }
        }
        by_dtype.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
        Description {
            format: self.gguf.as_ref().map_or("safetensors".into(), |g| format!("GGUF v{}", g.version())),
            model_type: self.config.get("model_type").and_then(Value::as_str).map(str::to_owned),
            files: self.files.iter().map(|f| (f.label().to_owned(), f.bytes().len() as u64)).collect(),
            tensors: self.tensors.len(),
            tensor_bytes: by_dtype.iter().map(|(_, bytes)| bytes).sum(),
            by_dtype,
        }
    }

    fn open_folder(folder: Folder, access: Access) -> Result<Checkpoint> {
        let names = |native| if native { (native::WEIGHTS, native::INDEX) } else { ("model.safetensors", INDEX) };
        for (weights, index) in [false, true].map(names) {
            if folder.exists(weights)? {
                let source = open_shard(&folder, weights, access)?;
                return Self::of_single(folder, source);
            }
            if let Some(json) = folder.json(index, MAX_JSON)? {
                let index = index::read(&json, &folder.label(index))?;
                return Self::open_sharded(folder, &index, access);
            }
        }
        Err(without_weights(&folder))
    }

    /// A file given by name: the whole checkpoint where it is one of several shards, else this file.
    fn open_safetensors(file: &Path, access: Access) -> Result<Checkpoint> {
        let folder = match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => Folder::Path(parent.into()),
            _ => Folder::Path(".".into()),
        };
        if !folder.exists("config.json")? && !folder.exists(native::PARAMS)? {
            bail!(NotFound, "{}: there is no config.json beside it, which says what the tensors mean", file.display());
        }
        if let Some(json) = folder.json(INDEX, MAX_JSON)? {
            let index = index::read(&json, &folder.label(INDEX))?;
            if index.shards.iter().any(|shard| file.file_name().is_some_and(|name| name == shard.as_str())) {
                return Self::open_sharded(folder, &index, access);
            }
        }
        Self::of_single(folder, Arc::new(Source::open(file, access)?))
    }

    fn of_single(folder: Folder, source: Arc<Source>) -> Result<Checkpoint> {
        let tensors = safetensors::read(&source)?.into_iter().map(|t| Located::straight(t, 0)).collect();
        Self::assemble(folder, vec![source], tensors)
    }

    fn open_sharded(folder: Folder, index: &index::Index, access: Access) -> Result<Checkpoint> {
        let (mut files, mut found) = (Vec::new(), HashMap::new());
        for (i, shard) in index.shards.iter().enumerate() {
            let source = open_shard(&folder, shard, access).context(|| format!("shard {} of {INDEX}", i + 1))?;
            for tensor in safetensors::read(&source)? {
                found.insert((i, tensor.name.clone()), tensor);
            }
            files.push(source);
        }
        let mut tensors = Vec::new();
        for (name, shard) in &index.tensors {
            let Some(tensor) = found.remove(&(*shard, name.clone())) else {
                let text = format!("{INDEX} puts tensor {name:?} into {:?}, which does not hold it", index.shards[*shard]);
                return Err(Error::new(Kind::CorruptFile, text).named(name));
            };
            tensors.push(Located::straight(tensor, *shard));
        }
        Self::assemble(folder, files, tensors)
    }

    /// A folder out of its parts. Where the file is Mistral's own, or there is no `config.json`, `params.json` says the same.
    fn assemble(folder: Folder, files: Vec<Arc<Source>>, mut tensors: Vec<Located>) -> Result<Checkpoint> {
        let label = folder.label("config.json");
        let own = files
            .first()
            .is_some_and(|f| Path::new(f.label()).file_name().is_some_and(|n| n.to_string_lossy().starts_with("consolidated")));
        let mut found = if own { None } else { folder.json("config.json", MAX_CONFIG)? };
        if found.is_none()
            && let Some(params) = folder.json(native::PARAMS, MAX_CONFIG)?
        {
            let config = native::config(&params).map_err(|e| e.context(folder.name()))?;
            native::translate(&mut tensors, &config)?;
            found = Some(config);
        }
        let Some(config) = found else { bail!(NotFound, "{label} does not exist") };
        if !config.is_object() {
            bail!(CorruptFile, "{label}: holds no JSON object");
        }
        let generation_config = folder.json("generation_config.json", MAX_CONFIG)?;
        let hf_quant = folder.json("hf_quant_config.json", MAX_CONFIG)?;
        let settings = Settings::read(&config, hf_quant.as_ref());
        let by_name = by_name(&tensors);
        Ok(Checkpoint { config, generation_config, folder: Some(folder), settings, files, gguf: None, tensors, by_name })
    }

    fn open_gguf(path: &Path, access: Access) -> Result<Checkpoint> {
        let first = Arc::new(Source::open(path, access)?);
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let open = |name: &str| Source::open(&path.with_file_name(name), access).map(Arc::new);
        Self::open_gguf_parts(first, &name, &open, Some(Folder::Path(folder.into())))
    }

    /// A GGUF file called `name` with those of its kind, which `open` finds by their names.
    fn open_gguf_parts(
        first: Arc<Source>,
        name: &str,
        open: &dyn Fn(&str) -> Result<Arc<Source>>,
        folder: Option<Folder>,
    ) -> Result<Checkpoint> {
        let first = Gguf::read(first)?;
        let count = first.u64("split.count")?.unwrap_or(1);
        let mut parts = vec![first];
        if count > 1 {
            let Some((stem, 1, of)) = detect::split_part(name).filter(|&(_, _, of)| u64::from(of) == count) else {
                let label = parts[0].source().label();
                bail!(InvalidArgument, "{label}: is one of {count} parts; open the first, named like model-00001-of-{count:05}.gguf");
            };
            for part in 2..=of {
                parts.push(Gguf::read(open(&format!("{stem}-{part:05}-of-{of:05}.gguf"))?)?);
            }
        }
        Self::from_gguf(parts, folder)
    }

    /// A checkpoint out of the parts of one GGUF; the first has the metadata.
    fn from_gguf(parts: Vec<Gguf>, folder: Option<Folder>) -> Result<Checkpoint> {
        let translated = dialect::translate(&parts)?;
        let by_name = by_name(&translated.tensors);
        if by_name.len() != translated.tensors.len() {
            bail!(CorruptFile, "{}: two tensors have the same name", parts[0].source().label());
        }
        let files = parts.iter().map(|p| p.source().clone()).collect();
        Ok(Checkpoint {
            config: translated.config,
            generation_config: Some(translated.generation_config),
            folder,
            settings: Ok(Settings::default()),
            files,
            gguf: parts.into_iter().next(),
            tensors: translated.tensors,
            by_name,
        })
    }
}

const INDEX: &str = "model.safetensors.index.json";

impl Located {
    fn straight(info: TensorInfo, file: usize) -> Located {
        let TensorInfo { name, dtype, shape, range } = info;
        Located { name, dtype, shape, file, range, row_map: RowMap::Straight, offset: 0.0 }
    }
}

fn by_name(tensors: &[Located]) -> HashMap<String, usize> {
    tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect()
}

/// Opens a safetensors file after a look at what it really is: shards are often left as LFS pointers.
fn open_shard(folder: &Folder, name: &str, access: Access) -> Result<Arc<Source>> {
    let (start, size) = folder.start(name, 512)?;
    match detect::content(&start, size) {
        // A file too short to tell is left to the parser, which says what is missing.
        Content::Safetensors => folder.open(name, access),
        Content::Other(_) if size > 0 && start.get(8).is_none_or(|&b| b == b'{') => folder.open(name, access),
        Content::Gguf => Err(detect::not_a_model(&folder.label(name), "a GGUF file under the name of a safetensors file")),
        Content::Other(what) => Err(detect::not_a_model(&folder.label(name), what)),
    }
}

fn without_weights(folder: &Folder) -> Error {
    let label = folder.name();
    if ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|file| folder.exists(file).unwrap_or(false)) {
        return Error::new(Kind::Unsupported, format!("{label}: the weights are Python pickles; convert them to safetensors"));
    }
    Error::new(Kind::NotFound, format!("{label}: has a config, but neither model.safetensors nor {INDEX} nor {}", native::WEIGHTS))
}
