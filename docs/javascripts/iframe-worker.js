// Search in the site opened as files, without a server.
//
// The theme searches in a Worker, which browsers refuse to pages at file:. There its script runs in
// a hidden frame instead, which has a window of its own and the same origin. The plugin `offline`
// writes the index as a script, as pages at file: cannot fetch it; it leaves out the copy of such a
// shim on the network if one is named like this file.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = [] // sent before the script has run
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      this.scope = frame.contentWindow
      // In a Worker's script these speak to the page.
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = url
      script.onload = () => {
        const messages = this.waiting
        this.waiting = undefined
        messages.forEach(data => this.postMessage(data))
      }
      script.onerror = () => this.dispatchEvent(new ErrorEvent("error", { message: `${url}` }))
      frame.contentDocument.head.appendChild(script)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }))
    }
  }
}
