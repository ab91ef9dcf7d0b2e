//! The CUDA driver as far as it is needed: a device, memory, copies, launches, recordings. `libcuda` is
//! opened when the first call is made; on a machine without it every call is an error, not a crash.
//! It knows nothing about kernels' meaning.

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuda_core::sys;
use tileinfer::{Error, Result};

/// How long the queue is held at most while work that is timed is put into it. That takes some tens of microseconds;
/// where it takes longer, as the work waits for the device itself, such waits are part of its time.
const LONGEST_HOLD: Duration = Duration::from_millis(1);

/// An address on the device.
pub type Address = sys::CUdeviceptr;

/// Turns the driver's answer into a result; `what` says what was tried.
fn check(code: sys::CUresult, what: &str) -> Result<()> {
    if code == sys::cudaError_enum_CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: the driver writes a pointer to a string of its own that lives for ever, or leaves null.
    let known =
        unsafe { sys::cuGetErrorString(code, &mut text) } == sys::cudaError_enum_CUDA_SUCCESS;
    let reason = if known && !text.is_null() {
        // SAFETY: a string of the driver, see above.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    } else {
        "the NVIDIA driver (libcuda.so.1) is missing, or too old for CUDA 13".to_owned()
    };
    Err(Error::Device(format!(
        "CUDA: {what}: {reason} (error {code})"
    )))
}

/// What there is to know about a device before it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// What the driver calls it.
    pub name: String,
    /// Compute capability, (9, 0) for example.
    pub capability: (i32, i32),
    /// Its multiprocessors.
    pub multiprocessors: i32,
    /// Bytes of its memory.
    pub memory: u64,
    /// Version of the driver, 13000 for 13.0.
    pub driver: i32,
}

/// The devices that the driver shows.
///
/// # Errors
/// [`Error::Device`] if there is no driver or it fails; the text says so.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    let mut count = 0;
    let mut driver = 0;
    // SAFETY: plain queries into local numbers.
    unsafe {
        check(sys::cuInit(0), "no usable GPU")?;
        check(
            sys::cuDriverGetVersion(&mut driver),
            "version of the driver",
        )?;
        check(sys::cuDeviceGetCount(&mut count), "number of devices")?;
    }
    (0..count)
        .map(|ordinal| device_info(ordinal, driver))
        .collect()
}

fn device_info(ordinal: i32, driver: i32) -> Result<DeviceInfo> {
    let what = format!("device {ordinal}");
    let mut device = 0;
    let mut name = [0; 128];
    let mut memory = 0;
    // SAFETY: queries into local variables of the sizes given.
    unsafe {
        check(sys::cuDeviceGet(&mut device, ordinal), &what)?;
        check(
            sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device),
            &what,
        )?;
        check(sys::cuDeviceTotalMem_v2(&mut memory, device), &what)?;
    }
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: a query into a local number.
        let code = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) };
        check(code, &what)?;
        Ok(value)
    };
    let major =
        attribute(sys::CUdevice_attribute_enum_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor =
        attribute(sys::CUdevice_attribute_enum_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let multiprocessors =
        attribute(sys::CUdevice_attribute_enum_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // SAFETY: the driver ends the name with a zero within the array.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }
        .to_string_lossy()
        .into_owned();
    Ok(DeviceInfo {
        name,
        capability: (major, minor),
        multiprocessors,
        memory: memory as u64,
        driver,
    })
}

/// An open device and the one stream everything is queued on.
#[derive(Debug)]
pub struct Device {
    info: DeviceInfo,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: the driver's handles may be used from any thread; every method makes the context current on its
// own thread first.
unsafe impl Send for Device {}
// SAFETY: as above; the driver locks what calls share.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// [`Error::Device`] if there is none of that number or the driver refuses.
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        let known = devices()?;
        let Some(info) = known.get(ordinal).cloned() else {
            return Err(Error::Device(format!(
                "there is no GPU number {ordinal}: the driver shows {}",
                known.len()
            )));
        };
        let mut device = 0;
        let mut context = ptr::null_mut();
        let mut stream = ptr::null_mut();
        // SAFETY: handles are written to local variables; the context is made current before the stream
        // is created in it.
        unsafe {
            check(
                sys::cuDeviceGet(&mut device, ordinal as i32),
                "opening the device",
            )?;
            check(
                sys::cuDevicePrimaryCtxRetain(&mut context, device),
                "creating the context",
            )?;
            check(sys::cuCtxSetCurrent(context), "taking the context")?;
            let flag = sys::CUstream_flags_enum_CU_STREAM_NON_BLOCKING;
            check(sys::cuStreamCreate(&mut stream, flag), "creating a stream")?;
        }
        Ok(Arc::new(Device {
            info,
            context,
            stream,
        }))
    }

    /// What it is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn bind(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        let code = unsafe { sys::cuCtxSetCurrent(self.context) };
        check(code, "taking the context")
    }

    /// The stream that everything is queued on, for libraries that queue work of their own.
    pub fn stream(&self) -> sys::CUstream {
        self.stream
    }

    /// Waits until everything queued has run.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        let code = unsafe { sys::cuStreamSynchronize(self.stream) };
        check(code, "waiting for the device")
    }

    /// Bytes free and in all.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a query into local numbers.
        let code = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        check(code, "asking for free memory")?;
        Ok((free as u64, total as u64))
    }

    /// Allocates device memory; what it holds is undefined.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] with the numbers.
    pub fn alloc(self: &Arc<Self>, what: &str, bytes: usize) -> Result<Memory> {
        self.bind()?;
        let mut address = 0;
        // SAFETY: the address is written to a local variable.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(16)) };
        if code == sys::cudaError_enum_CUDA_ERROR_OUT_OF_MEMORY {
            let (available, _) = self.memory()?;
            return Err(Error::OutOfMemory {
                what: what.to_owned(),
                needed: bytes as u64,
                available,
            });
        }
        check(code, what)?;
        Ok(Memory {
            device: self.clone(),
            address,
            bytes,
        })
    }

    /// Allocates host memory that the device can read and write at full speed, zeroed.
    pub fn alloc_pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned> {
        self.bind()?;
        let mut address = ptr::null_mut();
        // SAFETY: the address is written to a local variable, the bytes to memory just obtained.
        unsafe {
            check(
                sys::cuMemHostAlloc(&mut address, bytes.max(16), 0),
                "allocating pinned memory",
            )?;
            ptr::write_bytes(address.cast::<u8>(), 0, bytes.max(16));
        }
        Ok(Pinned {
            device: self.clone(),
            address: address.cast(),
            bytes,
        })
    }

    /// Copies bytes to the device and waits until they may be changed again.
    pub fn upload(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's slice is read before the call below returns; the target is checked by the
        // driver to be device memory.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream)
        };
        check(code, "copying to the device")?;
        self.synchronize()
    }

    /// Copies bytes from the device, after everything queued.
    pub fn download(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the slice outlives the wait below.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.stream)
        };
        check(code, "copying from the device")?;
        self.synchronize()
    }

    /// Queues a copy from pinned memory to the device.
    pub fn queue_upload(
        &self,
        to: Address,
        from: &Pinned,
        offset: usize,
        bytes: usize,
    ) -> Result<()> {
        assert!(
            offset + bytes <= from.bytes,
            "inside the pinned memory. This is a bug"
        );
        self.bind()?;
        // SAFETY: the range lies in `from`, whose owner keeps it and leaves it alone until an event after
        // this copy has passed.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.address.add(offset).cast(), bytes, self.stream)
        };
        check(code, "copying to the device")
    }

    /// Queues a copy from the device to pinned memory.
    pub fn queue_download(
        &self,
        to: &Pinned,
        offset: usize,
        from: Address,
        bytes: usize,
    ) -> Result<()> {
        assert!(
            offset + bytes <= to.bytes,
            "inside the pinned memory. This is a bug"
        );
        self.bind()?;
        // SAFETY: the range lies in `to`, whose owner reads it only after an event after this copy.
        let code = unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.address.add(offset).cast(), from, bytes, self.stream)
        };
        check(code, "copying from the device")
    }

    /// Queues a copy within the device.
    pub fn queue_copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: device addresses; the driver checks that they lie in allocations.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) };
        check(code, "copying on the device")
    }

    /// Queues the copy of `rows` runs of `bytes`, `to_pitch` and `from_pitch` bytes apart.
    pub fn queue_copy_rows(
        &self,
        to: Address,
        to_pitch: usize,
        from: Address,
        from_pitch: usize,
        bytes: usize,
        rows: usize,
    ) -> Result<()> {
        self.bind()?;
        // SAFETY: a struct of numbers and null pointers is all zeros.
        let mut copy: sys::CUDA_MEMCPY2D = unsafe { std::mem::zeroed() };
        copy.srcMemoryType = sys::CUmemorytype_enum_CU_MEMORYTYPE_DEVICE;
        copy.dstMemoryType = sys::CUmemorytype_enum_CU_MEMORYTYPE_DEVICE;
        (copy.srcDevice, copy.srcPitch) = (from, from_pitch);
        (copy.dstDevice, copy.dstPitch) = (to, to_pitch);
        (copy.WidthInBytes, copy.Height) = (bytes, rows);
        // SAFETY: device addresses; the driver checks that they lie in allocations.
        let code = unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream) };
        check(code, "copying columns")
    }

    /// Queues the filling of memory with a byte.
    pub fn queue_fill(&self, to: Address, value: u8, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: a device address; the driver checks that it lies in an allocation.
        let code = unsafe { sys::cuMemsetD8Async(to, value, bytes, self.stream) };
        check(code, "filling memory")
    }

    /// Loads machine code and finds the function called `name` in it.
    pub fn load(self: &Arc<Self>, image: &[u8], name: &str) -> Result<Function> {
        self.bind()?;
        let entry = CString::new(name).map_err(|_| Error::Bug(format!("kernel name {name:?}")))?;
        let mut module = ptr::null_mut();
        let mut function = ptr::null_mut();
        // SAFETY: the image is a cubin, which carries its own length; handles go to local variables.
        unsafe {
            check(
                sys::cuModuleLoadData(&mut module, image.as_ptr().cast()),
                &format!("loading {name}"),
            )?;
            check(
                sys::cuModuleGetFunction(&mut function, module, entry.as_ptr()),
                &format!("finding {name}"),
            )?;
        }
        Ok(Function {
            device: self.clone(),
            module,
            function,
        })
    }

    /// Queues a launch: `grid` tile blocks with these arguments.
    ///
    /// # Safety
    /// The arguments are those of the function's entry point, in order, and its contract holds.
    pub unsafe fn launch(
        &self,
        function: &Function,
        grid: [usize; 3],
        arguments: &[Argument],
    ) -> Result<()> {
        self.bind()?;
        let mut values = [0u64; 32];
        let mut pointers = [ptr::null_mut::<c_void>(); 32];
        assert!(
            arguments.len() <= values.len(),
            "too many arguments. This is a bug"
        );
        for (i, argument) in arguments.iter().enumerate() {
            values[i] = match *argument {
                Argument::Address(address) => address,
                Argument::Int(value) => u64::from(value.cast_unsigned()),
                Argument::Float(value) => u64::from(value.to_bits()),
            };
        }
        for (pointer, value) in pointers.iter_mut().zip(&mut values) {
            *pointer = ptr::from_mut(value).cast();
        }
        let [x, y, z] = grid.map(|blocks| blocks as u32);
        // The launch may begin while the kernel before it ends: every kernel waits for that by itself.
        // SAFETY: the pointers are to local values that outlive the call; the rest is the caller's promise.
        let launched = unsafe {
            cuda_core::launch_kernel_pdl(
                function.function,
                (x, y, z),
                (1, 1, 1),
                0,
                self.stream,
                &mut pointers,
            )
        };
        launched.or_else(|error| check(error.0, "launching a kernel"))
    }

    /// Records what `body` queues, without running it.
    pub fn record(self: &Arc<Self>, body: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode_enum_CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as `self` and is not recording: only this method starts one.
        let code = unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) };
        check(code, "starting to record")?;
        let queued = body();
        let mut graph = ptr::null_mut();
        self.bind()?;
        // SAFETY: ends the recording begun above, whatever `body` said.
        let ended = unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) };
        queued?;
        check(ended, "ending a recording")?;
        let mut exec = ptr::null_mut();
        // SAFETY: `graph` is the recording just ended; it is not used after it is destroyed.
        unsafe {
            let made = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            sys::cuGraphDestroy(graph);
            check(made, "preparing a recording")?;
        }
        Ok(Recording {
            device: self.clone(),
            exec,
        })
    }

    /// Queues a recording.
    pub fn replay(&self, recording: &Recording) -> Result<()> {
        self.bind()?;
        // SAFETY: both handles live.
        let code = unsafe { sys::cuGraphLaunch(recording.exec, self.stream) };
        check(code, "replaying a step")
    }

    /// A mark that can be put in the queue.
    pub fn event(self: &Arc<Self>) -> Result<Event> {
        self.bind()?;
        let mut event = ptr::null_mut();
        // SAFETY: the handle is written to a local variable.
        let code = unsafe { sys::cuEventCreate(&mut event, 0) };
        check(code, "creating an event")?;
        Ok(Event {
            device: self.clone(),
            event,
        })
    }

    /// Runs what `body` queues and waits for it: how long the device took. The queue is held until all of it is there,
    /// so that what the host needs for launches is not counted.
    pub fn time(self: &Arc<Self>, body: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let (start, end) = (self.event()?, self.event()?);
        let go = self.hold()?;
        let mut queue = || {
            start.record()?;
            body()?;
            end.record()
        };
        let queued = queue();
        go.store(true, Ordering::Release);
        queued?;
        end.wait()?;
        let seconds = f64::from(start.milliseconds_to(&end)?) / 1e3;
        Ok(Duration::from_secs_f64(seconds.max(0.0)))
    }

    /// Keeps the queue from going on until the flag is set, or for [`LONGEST_HOLD`].
    fn hold(&self) -> Result<Arc<AtomicBool>> {
        self.bind()?;
        let go = Arc::new(AtomicBool::new(false));
        let given = Arc::into_raw(go.clone());
        // SAFETY: the stream lives as long as `self`. `wait_for_go` takes what it is given as the counted pointer that
        // it is, once, and calls nothing of the driver.
        let code = unsafe {
            sys::cuLaunchHostFunc(
                self.stream,
                Some(wait_for_go),
                given.cast_mut().cast::<c_void>(),
            )
        };
        if let Err(error) = check(code, "holding the queue") {
            // SAFETY: nothing was queued, so that the count is still this function's.
            drop(unsafe { Arc::from_raw(given) });
            return Err(error);
        }
        Ok(go)
    }
}

/// What the driver runs when the queue comes to a hold: it goes on when this returns. (After an error of the device it
/// never runs, and the flag stays allocated.)
unsafe extern "C" fn wait_for_go(flag: *mut c_void) {
    // SAFETY: `Device::hold` gave this call, which the driver makes once, a count of the flag.
    let go = unsafe { Arc::from_raw(flag.cast_const().cast::<AtomicBool>()) };
    let start = Instant::now();
    while !go.load(Ordering::Acquire) && start.elapsed() < LONGEST_HOLD {
        // The thread that queues may need this core.
        std::thread::yield_now();
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // The context stays until the process ends: it is current on every thread that ever used the device, and a
        // thread that ends with a context that is gone takes the process with it.
        // SAFETY: everything that was made on the stream holds this device, so it is gone. What the driver says
        // about the end cannot be helped.
        unsafe {
            sys::cuCtxSetCurrent(self.context);
            sys::cuStreamDestroy_v2(self.stream);
        }
    }
}

/// An argument of a launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Argument {
    /// A device address.
    Address(Address),
    /// A 32-bit integer.
    Int(i32),
    /// A single-precision number.
    Float(f32),
}

impl From<Address> for Argument {
    fn from(address: Address) -> Self {
        Argument::Address(address)
    }
}

impl From<i32> for Argument {
    fn from(value: i32) -> Self {
        Argument::Int(value)
    }
}

impl From<usize> for Argument {
    fn from(value: usize) -> Self {
        Argument::Int(
            i32::try_from(value).expect("sizes are checked where tensors are made. This is a bug"),
        )
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Argument::Float(value)
    }
}

macro_rules! owner {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* } $drop:expr) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name {
            device: Arc<Device>,
            $($field: $type,)*
        }

        // SAFETY: a handle of the driver, which may be used from any thread.
        unsafe impl Send for $name {}
        // SAFETY: as above; methods that change what it owns take `&mut self` or are queued in order.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                if self.device.bind().is_ok() {
                    let release: fn(&mut $name) = $drop;
                    release(self);
                }
            }
        }
    };
}

owner! {
    /// Device memory, freed when dropped; that waits for what is queued.
    Memory { address: Address, bytes: usize }
    // SAFETY: the address came from cuMemAlloc and is freed once.
    |this| unsafe { sys::cuMemFree_v2(this.address); }
}

owner! {
    /// Pinned host memory.
    Pinned { address: *mut u8, bytes: usize }
    // SAFETY: the address came from cuMemHostAlloc and is freed once.
    |this| unsafe { sys::cuMemFreeHost(this.address.cast()); }
}

owner! {
    /// A function of loaded machine code.
    Function { module: sys::CUmodule, function: sys::CUfunction }
    // SAFETY: the module came from cuModuleLoadData; launches of its functions that are still queued keep
    // running, as cuModuleUnload waits for them.
    |this| unsafe { sys::cuModuleUnload(this.module); }
}

owner! {
    /// A recorded sequence of launches.
    Recording { exec: sys::CUgraphExec }
    // SAFETY: the handle came from cuGraphInstantiate and is destroyed once.
    |this| unsafe { sys::cuGraphExecDestroy(this.exec); }
}

owner! {
    /// A mark in the queue.
    Event { event: sys::CUevent }
    // SAFETY: the handle came from cuEventCreate and is destroyed once.
    |this| unsafe { sys::cuEventDestroy_v2(this.event); }
}

impl Memory {
    /// Where it begins: a multiple of 256.
    pub fn address(&self) -> Address {
        self.address
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Pinned {
    /// Its contents as 32-bit words.
    pub fn words(&mut self) -> &mut [i32] {
        // SAFETY: the memory is this object's, aligned to a page, `bytes` long and initialised when it was
        // allocated; any bytes are integers.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.bytes / 4) }
    }

    /// Its contents as 32-bit words, to read.
    pub fn read_words(&self) -> &[i32] {
        // SAFETY: as for `words`.
        unsafe { std::slice::from_raw_parts(self.address.cast_const().cast(), self.bytes / 4) }
    }

    /// Its contents as bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `words`.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Event {
    /// Puts the mark at the end of the queue.
    pub fn record(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both handles live.
        let code = unsafe { sys::cuEventRecord(self.event, self.device.stream) };
        check(code, "marking the queue")
    }

    /// Waits until the queue has passed the mark; a mark never put is passed.
    pub fn wait(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the handle lives.
        let code = unsafe { sys::cuEventSynchronize(self.event) };
        check(code, "waiting for the device")
    }

    /// Milliseconds from this mark to a later one, both passed.
    pub fn milliseconds_to(&self, end: &Event) -> Result<f32> {
        let mut time = 0.0;
        // SAFETY: a query of two live handles into a local number.
        let code = unsafe { sys::cuEventElapsedTime_v2(&mut time, self.event, end.event) };
        check(code, "measuring time")?;
        Ok(time)
    }
}
