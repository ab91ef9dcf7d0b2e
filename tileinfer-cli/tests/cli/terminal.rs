//! A terminal to run the command in: what is typed goes in, what is shown comes out.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// Longer than anything takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A pseudo-terminal and the process in it.
pub(crate) struct Terminal {
    keyboard: File,
    shown: Receiver<Vec<u8>>,
    /// Shown and not yet expected.
    pending: Vec<u8>,
    closed: Arc<AtomicBool>,
    child: Child,
}

impl Terminal {
    /// Starts `command` in a terminal of 80 columns.
    pub(crate) fn start(mut command: Command) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let size = Winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave = File::options().read(true).write(true).open(name).unwrap();
        tcsetwinsize(&slave, size).unwrap();
        let stream = || Stdio::from(OwnedFd::from(slave.try_clone().unwrap()));
        command
            .stdin(stream())
            .stdout(stream())
            .stderr(stream())
            .env("TERM", "xterm");
        // SAFETY: between fork and exec only two system calls are made, which allocate nothing.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                // The terminal is the new session's, so that Ctrl-C becomes a signal.
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        // The command holds copies of the slave: the screen ends once they are gone.
        drop((command, slave));
        let master = File::from(master);
        let mut screen = master.try_clone().unwrap();
        let (sender, shown) = channel();
        let closed = Arc::new(AtomicBool::new(false));
        let is_closed = Arc::clone(&closed);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while !is_closed.load(Ordering::SeqCst) {
                let wait = Timespec {
                    tv_sec: 0,
                    tv_nsec: 50_000_000,
                };
                let mut fds = [PollFd::new(&screen, PollFlags::IN)];
                if let Ok(0) = poll(&mut fds, Some(&wait)) {
                    continue;
                }
                // Reading fails when the last process has closed the terminal.
                let Ok(count @ 1..) = screen.read(&mut buffer) else {
                    break;
                };
                if sender.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Terminal {
            keyboard: master,
            shown,
            pending: Vec::new(),
            closed,
            child,
        }
    }

    /// Presses keys.
    pub(crate) fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Types a line and presses return.
    pub(crate) fn line(&mut self, text: &str) {
        self.press(&format!("{text}\r"));
    }

    /// Waits until `text` is shown, and returns all that is new before it.
    pub(crate) fn expect(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let at = self
                .pending
                .windows(text.len())
                .position(|window| window == text.as_bytes());
            if let Some(at) = at {
                let mut before: Vec<u8> = self.pending.drain(..at + text.len()).collect();
                before.truncate(at);
                return String::from_utf8_lossy(&before).into_owned();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => self.pending.extend(bytes),
                Err(why) => panic!(
                    "{text:?} is not shown ({why}), but {:?}",
                    String::from_utf8_lossy(&self.pending)
                ),
            }
        }
    }

    /// Closes the terminal, as a window that is closed does, and waits for the end of the process.
    pub(crate) fn hang_up(mut self) -> ExitStatus {
        self.closed.store(true, Ordering::SeqCst);
        // The screen's reader lets go of the terminal first.
        while self.shown.recv_timeout(PATIENCE).is_ok() {}
        // Whatever it is, writing to it is writing to nothing.
        self.keyboard = File::options().write(true).open("/dev/null").unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the process does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for the end of the process, and returns all that is new until then.
    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.shown.recv_timeout(left) {
                Ok(bytes) => self.pending.extend(bytes),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("the process does not end"),
            }
        }
        let status = self.child.wait().unwrap();
        (status, String::from_utf8_lossy(&self.pending).into_owned())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A test that failed leaves it running; one that waited for its end does not.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
