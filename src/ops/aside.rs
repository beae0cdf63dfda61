//! What the processor computes amid a program of a device.

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value};
use crate::error::Result;
use crate::{bail, op_common};

/// Holds the place of operations that another program has: the device stops here, hands out `inputs` and goes on with `outputs`.
#[derive(Clone, Debug)]
pub struct Aside {
    /// Which of the processor's programs that is.
    pub index: usize,
    /// f32, whole values.
    pub inputs: Vec<Value>,
    /// f32, whole values.
    pub outputs: Vec<Value>,
}

impl Op for Aside {
    op_common!("aside");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let inputs = self.inputs.iter_mut().map(|value| (Port::In, value));
        inputs.chain(self.outputs.iter_mut().map(|value| (Port::Out, value))).collect()
    }

    fn check(&self, _: &dyn Shapes) -> Result<Vec<Shape>> {
        bail!(Internal, "aside: is not recorded, but put in place of what was")
    }

    fn scalar(&self, frame: &Frame<'_>) {
        frame.failure.note(misplaced());
    }

    fn run(&self, frame: &Frame<'_>, _: &Turn<'_>) {
        frame.failure.note(misplaced());
    }

    fn launch(&self, _: &Gpu<'_>) -> Result<()> {
        Err(misplaced())
    }
}

fn misplaced() -> crate::error::Error {
    crate::error::Error::new(crate::error::Kind::Internal, "aside: stops a device's program and is never run")
}
