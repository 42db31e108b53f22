//! Orders of the parent to a worker that works idle GPUs: lines on its standard input.
//!
//! `silence`: stop, free the memory, keep the context; `work`: begin again; `end`: free everything
//! and exit; `duty 0.5`: compute for half of the time. The end of the input is an order to end: the
//! parent is gone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a worker is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Work,
    Silence,
    End,
}

impl Order {
    pub(crate) fn line(self) -> &'static str {
        match self {
            Self::Work => "work",
            Self::Silence => "silence",
            Self::End => "end",
        }
    }

    fn of(line: &str) -> Option<Self> {
        [Self::Work, Self::Silence, Self::End]
            .into_iter()
            .find(|it| it.line() == line)
    }
}

/// The line that sets the duty cycle.
pub(crate) fn duty_line(duty: f64) -> String {
    format!("{DUTY}{duty:.4}")
}

/// The parent expects a report each half second, and takes a worker for hung after ten of them.
const REST_MAXIMUM: Duration = Duration::from_secs(2);
const DUTY: &str = "duty ";

/// The newest orders, as a thread of their own reads them.
#[derive(Clone, Debug)]
pub(super) struct Orders {
    shared: Arc<(Mutex<State>, Condvar)>,
    /// SIGTERM, which is an order to end, too.
    is_terminated: Arc<AtomicBool>,
}

/// Poll interval for SIGTERM; orders wake a wait.
const SIGNAL_POLL: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct State {
    order: Order,
    duty: f64,
}

impl Orders {
    /// Reads standard input from now on; a worker begins with work.
    pub(super) fn listen() -> std::io::Result<Self> {
        let orders = Self::new();
        // Without the handler SIGTERM still ends the process.
        let is_terminated = Arc::clone(&orders.is_terminated);
        let _ = signal_hook::flag::register(signal_hook::consts::SIGTERM, is_terminated);
        let told = orders.clone();
        let read = move || told.read(std::io::stdin().lock());
        crate::threads::spawn("to read orders", read)?;
        Ok(orders)
    }

    fn new() -> Self {
        let state = State {
            order: Order::Work,
            duty: 1.0,
        };
        Self {
            shared: Arc::new((Mutex::new(state), Condvar::new())),
            is_terminated: Arc::default(),
        }
    }

    fn read(&self, input: impl std::io::BufRead) {
        for line in input.lines().map_while(Result::ok) {
            self.take(line.trim());
        }
        self.give(Order::End);
    }

    fn take(&self, line: &str) {
        if let Some(order) = Order::of(line) {
            self.give(order);
        }
        let duty = line.strip_prefix(DUTY).and_then(|it| it.parse().ok());
        if let Some(duty) = duty.filter(|it: &f64| *it > 0.0 && *it <= 1.0) {
            self.lock().duty = duty;
        }
    }

    /// An end is never taken back.
    fn give(&self, order: Order) {
        let mut state = self.lock();
        if state.order != Order::End {
            state.order = order;
        }
        drop(state);
        self.shared.1.notify_all();
    }

    /// The newest order.
    pub(super) fn order(&self) -> Order {
        if self.is_terminated.load(Ordering::Relaxed) {
            return Order::End;
        }
        self.lock().order
    }

    /// Waits for any order but `order`, or for so long.
    pub(super) fn wait_while(&self, order: Order, limit: Duration) {
        let until = Instant::now() + limit;
        while self.order() == order && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            let state = self.lock();
            let waited = self
                .shared
                .1
                .wait_timeout_while(state, left.min(SIGNAL_POLL), |it| it.order == order);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Rests after a step that took so long, by the duty cycle.
    pub(super) fn rest(&self, step: Duration) {
        let duty = self.lock().duty;
        if duty < 1.0 {
            let rest = step.mul_f64((1.0 - duty) / duty);
            self.wait_while(Order::Work, rest.min(REST_MAXIMUM));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_and_an_end_is_final() {
        let orders = Orders::new();
        assert_eq!(orders.order(), Order::Work);
        orders.take("silence");
        assert_eq!(orders.order(), Order::Silence);
        for nonsense in ["", "stop", "duty 0", "duty 2", "duty NaN", "duty"] {
            orders.take(nonsense);
        }
        assert_eq!(orders.order(), Order::Silence);
        assert!((orders.lock().duty - 1.0).abs() < f64::EPSILON);
        orders.take(&duty_line(0.25));
        assert!((orders.lock().duty - 0.25).abs() < f64::EPSILON);
        orders.take("end");
        orders.take("work");
        assert_eq!(orders.order(), Order::End);
    }

    #[test]
    fn the_end_of_the_input_is_an_order_to_end() {
        let orders = Orders::new();
        orders.read("silence\n".as_bytes());
        assert_eq!(orders.order(), Order::End);
    }

    #[test]
    fn a_rest_is_as_long_as_the_duty_cycle_asks_and_ends_with_an_order() {
        let orders = Orders::new();
        orders.take("duty 0.5");
        let began = Instant::now();
        orders.rest(Duration::from_millis(40));
        assert!(began.elapsed() >= Duration::from_millis(40));
        orders.take("duty 0.001");
        let resting = orders.clone();
        let rests = std::thread::spawn(move || resting.rest(Duration::from_secs(1)));
        orders.take("silence");
        let began = Instant::now();
        rests.join().expect("it rests");
        assert!(began.elapsed() < Duration::from_secs(1));
    }
}
