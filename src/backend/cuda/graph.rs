//! Captured work: what a stream was given once, to be queued again as one piece.
#![allow(unsafe_code)] // calls of the driver

use super::device::Device;
use super::stream::{Queue, Stream};
use super::sys::{self, CUgraphExec};
use crate::error::Result;
use std::sync::Arc;

/// Work that was captured. Memory that it uses must live as long.
pub struct Graph {
    device: Arc<Device>,
    raw: CUgraphExec,
}

// SAFETY: a graph may be launched from any thread, one at a time, which `&mut` sees to.
unsafe impl Send for Graph {}

impl Stream {
    /// Captures what `work` queues here, for a graph that is launched on `to`; nothing of it is done. Meanwhile nobody else uses this stream, for what they
    /// queue would be captured too, and nobody may wait for it.
    pub fn capture(&self, to: &Stream, work: impl FnOnce(&Queue<'_>) -> Result<()>) -> Result<Graph> {
        let queue = self.queue()?;
        let api = queue.at.api();
        // Kernels may be loaded on the way, which the stricter modes forbid.
        // SAFETY: the stream lives.
        queue.at.check(unsafe { (api.cuStreamBeginCapture_v2)(self.raw, sys::CAPTURE_RELAXED) }, "a capture")?;
        let worked = work(&queue);
        let mut captured = std::ptr::null_mut();
        // SAFETY: the capture that was begun; writes a graph.
        let ended = queue.at.check(unsafe { (api.cuStreamEndCapture)(self.raw, &mut captured) }, "a capture");
        let mut raw = std::ptr::null_mut();
        let made = worked.and(ended).and_then(|()| {
            // SAFETY: the graph that was captured; writes one that can be launched.
            queue.at.check(unsafe { (api.cuGraphInstantiateWithFlags)(&mut raw, captured, 0) }, "a graph")
        });
        if !captured.is_null() {
            // SAFETY: ours, and no longer needed.
            unsafe { (api.cuGraphDestroy)(captured) };
        }
        made?;
        let graph = Graph { device: Arc::clone(&self.device), raw };
        // SAFETY: both live.
        queue.at.check(unsafe { (api.cuGraphUpload)(raw, to.raw) }, "a graph")?;
        Ok(graph)
    }
}

impl Graph {
    /// Queues the work.
    pub fn launch(&mut self, stream: &Stream) -> Result<()> {
        let at = self.device.enter()?;
        // SAFETY: both live, and the memory of the work as well by the type's promise.
        at.check(unsafe { (at.api().cuGraphLaunch)(self.raw, stream.raw) }, "a graph")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Some(at) = self.device.enter_anyway() {
            // SAFETY: made by `capture`.
            unsafe { (at.api().cuGraphExecDestroy)(self.raw) };
        }
    }
}
