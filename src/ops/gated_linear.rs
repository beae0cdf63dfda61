//! The products of a gate and of what it is multiplied with, and the activation: for devices, whose kernel for many rows keeps both products.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{ActMul, Frame, Gpu, Linear, Op, Port, Shape, Shapes, Turn, Value, linear_launch};
use crate::error::Result;
use crate::op_common;

/// `h = W x + b; y = act(gate) * up`, gate and `up` the halves of `h`: fusion of [`Linear`] and [`ActMul`].
#[derive(Clone, Debug)]
pub struct GatedLinear {
    /// Its `y` is written, and read by `act`, only where the two are queued one after the other.
    pub linear: Linear,
    /// Reads column ranges of the product.
    pub act: ActMul,
    /// Whether the gate is the second half.
    pub up_first: bool,
}

impl Op for GatedLinear {
    op_common!("gated_linear");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = self.linear.ports();
        ports.push((Port::Out, &mut self.act.y));
        ports
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok([self.linear.check(shapes)?, self.act.check(shapes)?].concat())
    }

    fn prepares(&self) -> Option<Value> {
        Some(self.act.y)
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        if linear_launch::gated(self, gpu)? {
            return Ok(());
        }
        self.linear.launch(gpu)?;
        self.act.launch(gpu)
    }

    fn gpu_scratch_of(&self, width: &dyn Fn(Value) -> usize, rows: usize, segments: usize, context: usize, processors: usize) -> usize {
        self.linear.gpu_scratch_of(width, rows, segments, context, processors)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        self.linear.scalar(frame);
        self.act.scalar(frame);
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        // One piece: no processor runs this.
        turn.each(1, 1, |_| self.scalar(frame));
    }
}
