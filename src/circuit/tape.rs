//! Recording: a family's layers write their mathematics onto a tape, one operation at a time.
//!
//! Recording methods return values, not results: the first misfit is kept and [`Tape::finish`] returns it, with the layer and the
//! operation it arose in. So a layer reads like its formula.

use crate::error::{Error, Result};
use crate::ops::{self, Kind, KvSpec, Op, Port, Shape, Shapes, SlotId, StateId, Value, WeightId};

/// Shapes of what a model declared before recording.
pub trait Declared {
    /// `[rows, cols]` of a weight; a vector is `[1, len]`.
    fn weight(&self, id: WeightId) -> (usize, usize);
    /// Matrices of a weight: its experts, else 1.
    fn experts(&self, id: WeightId) -> usize;
    /// Dims of a layer's key/value pages.
    fn kv(&self, id: StateId) -> KvSpec;
    /// Elements of a recurrent slot.
    fn slot(&self, id: SlotId) -> usize;
    /// The weight's name, for `explain`.
    fn weight_name(&self, id: WeightId) -> &str;
}

/// One recorded operation and the layer it belongs to.
#[derive(Debug)]
pub struct Node {
    /// The operation.
    pub op: Box<dyn Op>,
    /// Decoder layer, or none outside of layers.
    pub layer: Option<usize>,
}

impl Clone for Node {
    fn clone(&self) -> Self {
        Node { op: self.op.boxed(), layer: self.layer }
    }
}

/// What is known of a value.
#[derive(Clone, Debug)]
pub struct ValueInfo {
    /// Rows, width, kind.
    pub shape: Shape,
    /// Name it can be read by (`logits`, `layer.3`), if any.
    pub name: Option<String>,
    /// Where it is a column range: the whole value and the first column.
    pub part_of: Option<(Value, usize)>,
}

/// A recorded computation: operations in order, their values, and the value that is the result.
#[derive(Clone, Debug)]
pub struct Circuit {
    /// Operations in order.
    pub nodes: Vec<Node>,
    /// By value number.
    pub values: Vec<ValueInfo>,
    /// Values that are there before it runs.
    pub inputs: Vec<Value>,
    /// The result (logits).
    pub output: Value,
    /// Whether bfloat16 weights meet activations rounded to bfloat16 where the processor does that faster.
    pub rounds: bool,
    /// Whether a device takes kernels whose sums have the same order for any batch.
    pub fixed_order: bool,
}

impl Circuit {
    /// The value of that name.
    pub fn named(&self, name: &str) -> Option<Value> {
        self.values.iter().position(|v| v.name.as_deref() == Some(name)).map(|i| Value(i as u32))
    }

    /// The value whose memory a value shares: itself, or the one it is a column range of.
    pub fn root(&self, mut value: Value) -> Value {
        while let Some((whole, _)) = self.values[value.0 as usize].part_of {
            value = whole;
        }
        value
    }

    /// Adds a value, for passes.
    pub fn new_value(&mut self, shape: Shape) -> Value {
        self.values.push(ValueInfo { shape, name: None, part_of: None });
        Value(self.values.len() as u32 - 1)
    }
}

/// Records a circuit.
pub struct Tape<'a> {
    declared: &'a dyn Declared,
    nodes: Vec<Node>,
    values: Vec<ValueInfo>,
    layer: Option<usize>,
    all_logits: bool,
    error: Option<Error>,
}

impl Shapes for Tape<'_> {
    fn value(&self, value: Value) -> Shape {
        // A misfit left an unconnected value behind; any shape will do, the first error is what is reported.
        self.values.get(value.0 as usize).map_or(Shape::f32(ops::Rows::All, 0), |v| v.shape)
    }
    fn weight(&self, weight: WeightId) -> (usize, usize) {
        self.declared.weight(weight)
    }
    fn experts(&self, weight: WeightId) -> usize {
        self.declared.experts(weight)
    }
    fn kv(&self, state: StateId) -> KvSpec {
        self.declared.kv(state)
    }
    fn slot(&self, slot: SlotId) -> usize {
        self.declared.slot(slot)
    }
}

impl<'a> Tape<'a> {
    /// An empty tape over a model's declarations. `all_logits` asks for a row of logits at every position.
    pub fn new(declared: &'a dyn Declared, all_logits: bool) -> Tape<'a> {
        Tape { declared, nodes: Vec::new(), values: Vec::new(), layer: None, all_logits, error: None }
    }

    /// Whether logits are wanted at every position.
    pub fn all_logits(&self) -> bool {
        self.all_logits
    }

    /// What follows belongs to decoder layer `layer`, or to none.
    pub fn set_layer(&mut self, layer: Option<usize>) {
        self.layer = layer;
    }

    /// Width of a value.
    pub fn width(&self, value: Value) -> usize {
        self.value(value).width
    }

    /// Records an operation and returns its outputs, in port order.
    pub fn record(&mut self, op: impl Op + 'static) -> Vec<Value> {
        let mut op: Box<dyn Op> = Box::new(op);
        let shapes = match op.check(self) {
            Ok(shapes) => shapes,
            Err(e) => {
                let place = self.layer.map_or_else(String::new, |l| format!("layer {l} "));
                self.error.get_or_insert(e.context(format!("{place}{}", op.name())));
                Vec::new()
            }
        };
        let mut outputs = Vec::new();
        let mut shapes = shapes.into_iter();
        for (port, value) in op.ports() {
            if port == Port::Out {
                let shape = shapes.next().unwrap_or(Shape::f32(ops::Rows::All, 0));
                self.values.push(ValueInfo { shape, name: None, part_of: None });
                *value = Value(self.values.len() as u32 - 1);
                outputs.push(*value);
            }
        }
        self.nodes.push(Node { op, layer: self.layer });
        outputs
    }

    /// Records an operation with one output.
    pub fn op(&mut self, op: impl Op + 'static) -> Value {
        self.record(op).first().copied().unwrap_or(Value::NONE)
    }

    /// Columns `start .. start + width` of a value; shares its memory.
    pub fn slice(&mut self, value: Value, start: usize, width: usize) -> Value {
        let whole = self.value(value);
        if start + width > whole.width || whole.kind != Kind::F32 {
            let text = format!("columns {start}..{} of {whole:?}", start + width);
            self.error.get_or_insert(Error::new(crate::error::Kind::Internal, text));
        }
        if start == 0 && width == whole.width {
            return value;
        }
        self.values.push(ValueInfo { shape: Shape { width, sliced: true, ..whole }, name: None, part_of: Some((value, start)) });
        Value(self.values.len() as u32 - 1)
    }

    /// Names a value, so that a host can read it.
    pub fn name(&mut self, value: Value, name: impl Into<String>) {
        if let Some(info) = self.values.get_mut(value.0 as usize) {
            info.name = Some(name.into());
        }
    }

    /// `a + b`.
    pub fn add(&mut self, a: Value, b: Value) -> Value {
        self.op(ops::Add { a, b, y: Value::NONE })
    }

    /// `factor * x`; records nothing for a factor of 1.
    pub fn scale(&mut self, x: Value, factor: f32) -> Value {
        if factor == 1.0 { x } else { self.op(ops::Scale { x, factor, y: Value::NONE }) }
    }

    /// Notes an error found while recording.
    pub fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }

    /// The circuit, or the first misfit.
    pub fn finish(self, output: Value) -> Result<Circuit> {
        match self.error {
            Some(e) => Err(e),
            None => {
                let (nodes, values, inputs) = (self.nodes, self.values, Vec::new());
                Ok(Circuit { nodes, values, inputs, output, rounds: false, fixed_order: false })
            }
        }
    }
}
